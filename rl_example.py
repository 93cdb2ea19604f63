"""Train a language model by reinforcement learning with vLLM producers, ColossalAI trainers and verifiable rewards.

--help lists the flags.

Exit code: 0 success, 1 the run failed, 2 invalid arguments (nothing was started), 130 interrupted.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coati_rl.config import Config
from coati_rl.config.cli import parse
from coati_rl.config.installed import with_installed
from coati_rl.config.launchers import with_launcher
from coati_rl.config.rules import check
from coati_rl.driver.command import exit_code_of, plan_or_launch
from coati_rl.preflight.data_files import expect_files
from coati_rl.preflight.prepared import unchecked
from coati_rl.processes.actor_classes import ActorClasses
from coati_rl.processes.child_call import call_in_child
from coati_rl.processes.exit_messages import print_lines
from coati_rl.processes.imports import uncollected
from coati_rl.processes.run_dir import RunPaths, probe_outputs
from coati_rl.processes.subreaper import run_under_subreaper

if TYPE_CHECKING:
    from coati_rl.preflight.prepared_run import Prepared
    from coati_rl.protocols import GroupScorer


def main(argv: Sequence[str], scratch: Path) -> int:
    """Run the command line and return its exit code; `scratch` is a temporary directory for sockets."""

    def body() -> None:
        config, is_dry_run = parse(argv)
        say = functools.partial(print_lines, prog=config.prog())
        config = with_launcher(with_installed(config, say), say)
        check(config)
        probe_outputs(config)
        expect_files(config)
        _run(config, is_dry_run, scratch)

    return exit_code_of(body, scratch)


def _run(config: Config, is_dry_run: bool, scratch: Path) -> None:
    if is_dry_run or config.cluster.master_address:
        prepared, make_scorer, warnings = _prepare(config, is_dry_run=is_dry_run)
    else:  # this process stays while engines and trainers need the memory
        prepared, make_scorer, warnings = call_in_child(
            lambda: _without_check(*_prepare(config, is_dry_run=False)), what="the preparation of the run"
        )

    def classes() -> ActorClasses:
        from coati_rl.driver.coordinator_actors import CoordinatorActor
        from consumer.actor import TrainerActor
        from consumer.scorer import ScorerActor
        from producer.actor import ProducerActor

        return ActorClasses(
            coordinator=CoordinatorActor,
            trainer=TrainerActor,
            producer=ProducerActor,
            scorer=ScorerActor,
            reward_model=_reward_model_cls(config),
            join_server=_join_server_cls(config),
            make_reward=make_scorer,
        )

    def sample() -> Iterable[str]:
        from rewards.first_prompt import first_prompt_lines

        return first_prompt_lines(prepared.config, prepared.read_prompts)

    def finish(paths: RunPaths) -> Iterable[str]:
        from consumer.merge_command import export_run

        return export_run(prepared.config, paths)

    plan_or_launch(
        prepared, classes, warnings=warnings, is_dry_run=is_dry_run, scratch=scratch, sample=sample, finish=finish
    )


def prepare_run(config: Config, *, is_dry_run: bool) -> "tuple[Prepared, tuple[str, ...]]":
    """Return the run's inputs, and warnings. Raises: ConfigError."""
    prepared, _, warnings = _prepare(config, is_dry_run=is_dry_run)
    return prepared, warnings


def _prepare(config: Config, *, is_dry_run: bool) -> "tuple[Prepared, Callable[[], GroupScorer], tuple[str, ...]]":
    """Return the run's inputs, what makes its scorers, and warnings. Raises: ConfigError."""
    with uncollected():
        from coati_rl.preflight.prepare import RunPreparation
        from coati_rl.preflight.prompts import RewardFacts
        from consumer.parallel.layout_rules import check_layout
        from consumer.proofs.model import try_model
        from producer.engines.decoding_trial import check_decoding
        from producer.engines.vllm_arguments import check_engine_args, check_quantization
        from producer.made_environment import check_environment
        from rewards.ground_truths import ground_truth_warnings
        from rewards.registry import columns_of, default_system_prompt, needs_ground_truth
        from rewards.scorer import scorer_factory

    make_scorer = scorer_factory(config)
    check_engine_args(config.sampling.engine_arg)
    check_quantization(config.sampling.quantization, gets_updates=True)
    preparation = RunPreparation(
        rewards=RewardFacts(
            default_system_prompt=default_system_prompt, needs_ground_truth=needs_ground_truth, columns_of=columns_of
        ),
        check_layout=check_layout,
        try_model=try_model,
        is_dry_run=is_dry_run,
        environment=check_environment(config),
    )
    prepared = preparation.prepare(config)
    model = Path(prepared.config.model.model)
    if prepared.config.sampling.backend == "transformers" and model.is_dir():  # in a dry run it may be elsewhere
        check_decoding(model)
    if prepared.config.engine_urls and not is_dry_run:
        from producer.engines.served.preflight import check_servers

        check_servers(prepared.config, prepared.plan.precision)
    datasets = {"--dataset": prepared.read_prompts}
    datasets |= {f"--eval-dataset {task}": prompts.prompts for task, prompts in prepared.evaluation.items()}
    return prepared, make_scorer, (*prepared.warnings, *ground_truth_warnings(config, datasets))


def _without_check(
    prepared: "Prepared", make_scorer: "Callable[[], GroupScorer]", warnings: tuple[str, ...]
) -> "tuple[Prepared, Callable[[], GroupScorer], tuple[str, ...]]":
    """Leave out the check of GPUs, which holds modules of torch: only those of other machines are checked later."""
    return dataclasses.replace(prepared, check_gpus=unchecked), make_scorer, warnings


def _reward_model_cls(config: Config) -> type | None:
    if not config.reward_models.names:
        return None
    from rewards.model.actor import RewardModelActor

    return RewardModelActor


def _join_server_cls(config: Config) -> type | None:
    if config.parallel.join_port is None:
        return None
    from producer.joining.server import JoinServerActor

    return JoinServerActor


def run(argv: Sequence[str]) -> int:
    """Run the command line in a child process that leaves nothing behind; returns the exit code."""
    return run_under_subreaper(functools.partial(main, argv))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
