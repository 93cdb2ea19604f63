"""Sample responses to the prompts of a dataset with an inference engine of this process, score them, and write them.

--help lists the flags; docs/generate.md shows what the rows are used for.

Exit code: 0 success, 1 it failed, 2 invalid arguments (nothing was started), 130 interrupted.
"""

import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coati_rl.config.cli import parse_job
from coati_rl.config.generate import GenerateConfig
from coati_rl.config.generate_rules import check_generate
from coati_rl.config.installed import with_installed
from coati_rl.preflight.data_files import expect_files
from coati_rl.processes.exit_codes import exit_code_of
from coati_rl.processes.exit_messages import print_lines
from coati_rl.processes.slow_phase import slow_phase
from coati_rl.processes.subreaper import run_under_subreaper
from producer.engines.environment import set_engine_environment

if TYPE_CHECKING:
    from coati_rl.preflight.prepare_generation import PreparedGeneration
    from coati_rl.protocols import GroupScorer
    from producer.batch.output import BatchOutput

_LOAD_TIMEOUT_S = 600.0  # of the engine
_PROG = GenerateConfig.prog()
_say = functools.partial(print_lines, prog=_PROG)


def main(argv: Sequence[str], scratch: Path) -> int:
    """Run the command line and return its exit code; `scratch` is a temporary directory."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)

    def body() -> None:
        config, is_dry_run = parse_job(argv, GenerateConfig)
        config = with_installed(config, _say)
        check_generate(config)
        expect_files(config)
        _run(config, is_dry_run=is_dry_run)

    return exit_code_of(body, prog=_PROG, goes_on="; the same command goes on")


def _run(config: GenerateConfig, *, is_dry_run: bool) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))  # before torch is imported
    has_gpu = config.engine.device != "cpu" and any(Path("/dev").glob("nvidia[0-9]*"))
    set_engine_environment("cuda" if has_gpu else "cpu", config.engine)  # before transformers is imported
    from coati_rl.preflight.prepare_generation import prepare_generation
    from coati_rl.preflight.prompts import RewardFacts
    from producer.batch.output import BatchOutput, earlier_settings
    from producer.batch.unscored import Unscored
    from producer.engines.decoding_trial import check_decoding
    from producer.engines.vllm_arguments import check_engine_args, check_quantization
    from rewards.first_prompt import first_prompt_lines
    from rewards.ground_truths import ground_truth_warnings
    from rewards.registry import columns_of, default_system_prompt, needs_ground_truth
    from rewards.scorer import scorer_factory

    run = config.as_run()
    check_engine_args(run.sampling.engine_arg)
    check_quantization(run.sampling.quantization, gets_updates=False)
    make_scorer: Callable[[], GroupScorer] = scorer_factory(run, in_cluster=False) if config.is_scored else Unscored
    facts = RewardFacts(
        default_system_prompt=default_system_prompt, needs_ground_truth=needs_ground_truth, columns_of=columns_of
    )
    earlier = None if config.output.overwrite else earlier_settings(Path(config.output.output or ""))
    prepared = prepare_generation(config, rewards=facts, earlier=earlier)
    if config.sampling.backend == "transformers":
        check_decoding(prepared.model)
    told = [*prepared.warnings]
    if config.is_scored:
        told += ground_truth_warnings(run, {"--dataset": prepared.prompts.prompts})
    for warning in told:
        _say(f"warning: {warning}")
    output = BatchOutput(prepared.output, prepared.settings, overwrite=config.output.overwrite)
    if is_dry_run:
        first = first_prompt_lines(run, prepared.prompts.prompts, is_scored=config.is_scored)
        print("\n".join([*prepared.lines(), *first]))
        return
    with output:
        figures = _generate(prepared, output, make_scorer)
    with suppress(OSError):  # the terminal may be closed
        print(f"done: {prepared.output}: {json.dumps(figures)}", flush=True)


def _generate(
    prepared: "PreparedGeneration", output: "BatchOutput", make_scorer: "Callable[[], GroupScorer]"
) -> dict[str, Any]:
    """Load the engine and sample what the output does not have yet; returns the figures of all prompts."""
    from producer.batch.batch_inference import BatchJob, run_batch
    from producer.batch.rows import Selection
    from producer.batch.summary import summarise
    from producer.engines import EngineOptions, create_engine

    config, sampling, engine = prepared.config, prepared.config.sampling, prepared.config.engine
    if len(output.records) == len(prepared.prompts.prompts):
        return summarise(output.records, group_size=sampling.num_generations, is_scored=config.is_scored)
    if output.records:
        _say(f"{prepared.output} has {len(output.records)} of {len(prepared.prompts.prompts)} prompts: going on")
    set_engine_environment(prepared.device, engine)
    chosen = config.output
    job = BatchJob(
        prompts=prepared.prompts.prompts,
        leases=prepared.leases(),
        selection=Selection(
            is_scored=config.is_scored,
            best_of=chosen.best_of,
            pairs=chosen.pairs,
            min_reward=chosen.min_reward,
            reward_template=chosen.reward_template,
        ),
        group_size=sampling.num_generations,
        max_sequences=config.max_sequences,
        max_failure_rate=chosen.max_failure_rate,
        stall_timeout_s=engine.stall_timeout_s,
    )
    with closing(make_scorer()) as scorer:  # its processes start while the engine loads
        options = EngineOptions.with_flags(
            engine,
            model=str(prepared.model),
            tensor_parallel_size=engine.producer_tensor_parallel_size,
            dtype=prepared.dtype,
            max_model_len=config.as_run().max_model_len,
            max_num_seqs=engine.max_num_seqs or config.max_sequences,
            seed=sampling.seed,
            device=prepared.device,
            gpu_memory_utilization=engine.gpu_memory_utilization,
        )
        with slow_phase("the engine loads the model", _say):
            loaded = create_engine(sampling.backend, options, load_timeout_s=_LOAD_TIMEOUT_S)
        with closing(loaded):
            return run_batch(job, output, loaded, scorer, report=_say)


def run(argv: Sequence[str]) -> int:
    """Run the command line in a child process that leaves nothing behind; returns the exit code."""
    return run_under_subreaper(functools.partial(main, argv), prog=_PROG)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
