"""Train a language model by reinforcement learning with vLLM producers, ColossalAI trainers and verifiable rewards.

--help lists the flags.

Exit code: 0 success, 1 the run failed, 2 invalid arguments (nothing was started), 130 interrupted.
"""

import functools
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from coati_rl.config import Config
from coati_rl.config.cli import parse
from coati_rl.config.rules import check
from coati_rl.errors import CoatiError, ConfigError
from coati_rl.runtime.exit_messages import print_lines, read_note
from coati_rl.runtime.ray_environment import prepare_ray_environment
from coati_rl.runtime.run_dir import probe_outputs
from coati_rl.runtime.subreaper import run_under_subreaper


def main(argv: Sequence[str], scratch: Path) -> int:
    """Run the command line and return its exit code; `scratch` is a temporary directory for sockets."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger().handlers[0].setLevel(logging.WARNING)  # the rest goes to the run's driver.log
    try:
        config, is_dry_run = parse(argv)
        check(config)
        probe_outputs(config)
        return _run(config, is_dry_run, scratch)
    except ConfigError as error:
        print_lines(str(error))
        return 2
    except CoatiError as error:
        print_lines(f"the run failed: {' '.join(str(error).split())}{read_note(scratch).how_to_resume()}")
        return 1
    except KeyboardInterrupt as interrupt:
        problem = f"; {interrupt}" if str(interrupt) else ""
        print_lines(f"interrupted; everything was stopped{problem}{read_note(scratch).how_to_resume()}")
        return 130


def _run(config: Config, is_dry_run: bool, scratch: Path) -> int:
    from coati_rl.runtime.prepare import prepare
    from coati_rl.runtime.prompts import RewardFacts
    from consumer.parallel.layout_rules import check_layout
    from rewards.ground_truths import ground_truth_warnings
    from rewards.registry import columns_of, default_system_prompt, needs_ground_truth
    from rewards.scorer import scorer_factory

    make_scorer = scorer_factory(config)
    prepared = prepare(
        config,
        rewards=RewardFacts(
            default_system_prompt=default_system_prompt, needs_ground_truth=needs_ground_truth, columns_of=columns_of
        ),
        check_layout=check_layout,
        is_dry_run=is_dry_run,
    )
    datasets = {"--dataset": prepared.train.prompts}
    datasets |= {f"--eval-dataset {task}": prompts.prompts for task, prompts in prepared.evaluation.items()}
    for warning in (*prepared.warnings, *ground_truth_warnings(config, datasets)):
        print_lines(f"warning: {warning}")
    if is_dry_run:
        print("\n".join(prepared.plan.lines()))
        if prepared.resume is not None:
            print("\n".join([prepared.resume.line(), *prepared.resume.changes]))
        return 0
    prepare_ray_environment(prepared.config)
    # Imported here, so that errors on the command line are reported before Ray, vLLM and ColossalAI are loaded.
    from coati_rl.runtime.launch import launch
    from consumer.actor import TrainerActor
    from producer.actor import ProducerActor

    paths = launch(
        prepared,
        ProducerActor,
        TrainerActor,
        make_scorer,
        scratch=scratch,
        reward_model_cls=_reward_model_cls(prepared.config),
    )
    with suppress(OSError):  # the terminal may be closed
        print(f"done: {paths.run_dir}{read_note(scratch).how_to_train_on()}", flush=True)
    return 0


def _reward_model_cls(config: Config) -> type | None:
    if not config.reward_models:
        return None
    from rewards.model.actor import RewardModelActor

    return RewardModelActor


def run(argv: Sequence[str]) -> int:
    """Run the command line in a child process that leaves nothing behind; returns the exit code."""
    return run_under_subreaper(functools.partial(main, argv))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
