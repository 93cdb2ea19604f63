"""Reinforcement learning of a language model: vLLM producers, ColossalAI trainers, verifiable rewards.

--help lists the flags.

Exit code: 0 success, 2 bad arguments (nothing was started), 1 a failed run, 130 after Ctrl-C or another signal to end.
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
from coati_rl.runtime.ending import read_note, say
from coati_rl.runtime.guardian import run_guarded
from coati_rl.runtime.ray_environment import prepare_ray_environment
from coati_rl.runtime.run_dir import probe_outputs


def main(argv: Sequence[str], scratch: Path) -> int:
    """Run the command line and return its exit code; `scratch` is a short-lived directory for sockets."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger().handlers[0].setLevel(logging.WARNING)  # the rest goes to the run's driver.log
    try:
        config, is_dry_run = parse(argv)
        check(config)
        probe_outputs(config)
        return _run(config, is_dry_run, scratch)
    except ConfigError as error:
        say(str(error))
        return 2
    except CoatiError as error:
        say(f"the run failed: {' '.join(str(error).split())}{read_note(scratch).how_to_resume()}")
        return 1
    except KeyboardInterrupt as interrupt:
        problem = f"; {interrupt}" if str(interrupt) else ""
        say(f"interrupted; everything was stopped{problem}{read_note(scratch).how_to_resume()}")
        return 130


def _run(config: Config, is_dry_run: bool, scratch: Path) -> int:
    from coati_rl.runtime.prepare import prepare
    from consumer.parallel.layout_rules import check_layout
    from rewards.ground_truths import ground_truth_warnings
    from rewards.registry import default_system_prompt, needs_ground_truth
    from rewards.scorer import scorer_factory

    make_scorer = scorer_factory(config)
    prepared = prepare(
        config,
        system_prompt=default_system_prompt(config.reward.reward_type),
        needs_truth=needs_ground_truth(config.reward.reward_type),
        check_layout=check_layout,
        is_dry_run=is_dry_run,
    )
    datasets = {"--dataset": prepared.train.prompts}
    datasets |= {f"--eval-dataset {task}": prompts.prompts for task, prompts in prepared.evaluation.items()}
    for warning in (*prepared.warnings, *ground_truth_warnings(config.reward, datasets)):
        say(f"warning: {warning}")
    if is_dry_run:
        print("\n".join(prepared.plan.lines()))
        if prepared.resume is not None:
            print("\n".join([prepared.resume.line(), *prepared.resume.changes]))
        return 0
    prepare_ray_environment(prepared.config)
    # Imported only now: a mistake on the command line is answered before Ray, vLLM and ColossalAI are loaded.
    from coati_rl.runtime.launch import launch
    from consumer.actor import TrainerActor
    from producer.actor import ProducerActor

    paths = launch(prepared, ProducerActor, TrainerActor, make_scorer, scratch=scratch)
    with suppress(OSError):  # of a terminal that is gone
        print(f"done: {paths.run_dir}{read_note(scratch).how_to_train_on()}", flush=True)
    return 0


def run(argv: Sequence[str]) -> int:
    """Run the command line in a child process that leaves nothing behind; returns the exit code."""
    return run_guarded(functools.partial(main, argv))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
