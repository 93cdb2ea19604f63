"""Run `python -m consumer sft|rm|dpo|kto|prm|value ...`: train on a dataset, without producers; as `coati-rl sft`.

Exit code: 0 success, 1 the run failed, 2 invalid arguments (nothing was started), 130 interrupted.
"""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coati_rl.config.cli import parse_job
from coati_rl.config.commands import OFFLINE
from coati_rl.config.installed import with_installed
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.offline_rules import check_offline
from coati_rl.driver.command import exit_code_of, plan_or_launch
from coati_rl.errors import CoatiError
from coati_rl.preflight.data_files import expect_files
from coati_rl.processes.actor_classes import ActorClasses
from coati_rl.processes.exit_messages import print_lines
from coati_rl.processes.imports import uncollected
from coati_rl.processes.run_dir import probe_outputs
from coati_rl.processes.subreaper import run_under_subreaper
from coati_rl.processes.torchrun_trainers import TorchrunTrainers, with_torchrun
from coati_rl.processes.trainer_process import Spawned, early_trainers
from coati_rl.torchrun import TorchrunWorld, torchrun_world
from consumer.environment import trainer_environment
from consumer.merge_command import export_run

if TYPE_CHECKING:
    from coati_rl.preflight.prepare_offline import PreparedDataset

_LIBRARIES = ("consumer.actor", "consumer.backend")  # of a trainer's process; they take seconds


def main(arguments: Sequence[str]) -> int:
    """Run a command given by name, and return its exit code."""
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(f"usage: python -m consumer {'|'.join(OFFLINE)} ...  (COMMAND --help lists a command's flags)")
        return 0
    if name not in OFFLINE:
        sys.stderr.write(f"python -m consumer: no command {name!r}; use one of {', '.join(OFFLINE)}\n")
        return 2
    return run(OFFLINE[name], rest)


def run(job: type[OfflineConfig], arguments: Sequence[str]) -> int:
    """Run a job in a child process that leaves nothing behind, or as one of torchrun's; returns the exit code."""
    world = torchrun_world()
    if world is not None and world.rank > 0:
        return _follow(world)
    return run_under_subreaper(functools.partial(_main, job, arguments), prog=job.prog())


def _main(job: type[OfflineConfig], arguments: Sequence[str], scratch: Path) -> int:
    world = torchrun_world()

    def body() -> None:
        config, is_dry_run = parse_job(arguments, job)
        if world is not None:
            config = with_torchrun(config, world)
        config = with_installed(config, functools.partial(print_lines, prog=job.prog()))
        check_offline(config)
        probe_outputs(config)
        expect_files(config)
        if is_dry_run:
            _run(config, (), is_dry_run=True, scratch=scratch)
            return
        with early_trainers(config, trainer_environment, scratch, modules=_LIBRARIES) as early:
            _run(config, early, is_dry_run=False, scratch=scratch)

    try:
        return exit_code_of(body, scratch, prog=job.prog())
    finally:
        if world is not None:
            TorchrunTrainers(world).close()  # ends the others, if nothing was started


def _follow(world: TorchrunWorld) -> int:
    try:
        return TorchrunTrainers(world).follow(_LIBRARIES)
    except CoatiError as error:
        print_lines(str(error), prog="python -m consumer")
        return 1


def _run(config: OfflineConfig, early: Sequence[Spawned], *, is_dry_run: bool, scratch: Path) -> None:
    prepared, warnings = prepare_job(config, is_dry_run=is_dry_run)
    classes = functools.partial(_classes, early)
    finish = functools.partial(export_run, prepared.config)
    plan_or_launch(prepared, classes, warnings=warnings, is_dry_run=is_dry_run, scratch=scratch, finish=finish)


def prepare_job(config: OfflineConfig, *, is_dry_run: bool) -> "tuple[PreparedDataset, tuple[str, ...]]":
    """Return the job's inputs, and warnings. Raises: ConfigError."""
    with uncollected():
        from coati_rl.preflight.prepare_offline import DatasetPreparation
        from consumer.parallel.layout_rules import check_layout
        from consumer.proofs.model import try_model

    preparation = DatasetPreparation(check_layout=check_layout, try_model=try_model, is_dry_run=is_dry_run)
    prepared = preparation.prepare(config)
    return prepared, prepared.warnings


def _classes(early: Sequence[Spawned]) -> ActorClasses:
    from coati_rl.driver.coordinator_actors import DatasetCoordinatorActor, dataset_coordinator
    from consumer.actor import TrainerActor
    from consumer.scorer import ScorerActor

    return ActorClasses(
        scorer=ScorerActor,
        coordinator=DatasetCoordinatorActor,
        make_coordinator=dataset_coordinator,
        trainer=TrainerActor,
        early_trainers=early,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
