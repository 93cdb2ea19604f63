"""Rehearse a training command on this machine's CPU: `coati-rl rehearse [JOB] FLAGS...`, the flags of `coati-rl JOB`.

The command is prepared as it is, and a two-layer model of its architecture is trained by the real driver for two steps,
saved, resumed, evaluated, and loaded by transformers. Nothing is written but in a temporary directory that is removed.

Exit code: 0 nothing stops the command, 1 it would fail, 2 it would be refused, 130 interrupted.
"""

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from coati_rl.config import Config
from coati_rl.config.cli import parse_job
from coati_rl.config.commands import TRAINING
from coati_rl.config.installed import with_installed
from coati_rl.config.offline_rules import check_offline
from coati_rl.config.rules import check
from coati_rl.config.training import TrainingConfig
from coati_rl.driver.command import exit_code_of
from coati_rl.errors import CoatiError, ConfigError, RunError
from coati_rl.flag_numbers import integer_from, positive
from coati_rl.processes.child_call import ObjectInChild
from coati_rl.processes.exit_messages import print_lines
from coati_rl.processes.run_dir import probe_outputs
from coati_rl.processes.subreaper import run_under_subreaper
from coati_rl.rehearsal.command_run import SLOW, CommandRun
from coati_rl.rehearsal.preparation import Found, Preparation, TargetMachine, Written
from coati_rl.rehearsal.run_findings import failures, finding
from coati_rl.rehearsal.stages import RehearsalStage, Stages
from coati_rl.run_reader.run_directory import RunDirectory
from coati_rl.runtime.stand_in_nodes import StandInNodes, start_nodes
from coati_rl.text import count

_PROG = "coati-rl rehearse"
_LIMIT_S = 120.0
_REWARDS_S = 20.0  # of it, for rows of the dataset
_MAX_NODES = 3  # that are started: each takes seconds of a core


def main(arguments: Sequence[str] | None = None) -> int:
    """Rehearse a command. Returns: the exit code."""
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    job = words.pop(0) if words and words[0] in TRAINING else "rl"
    parser = _parser()
    if words in ([], ["-h"], ["--help"]):
        parser.print_help()
        return 0 if words else 2
    options, flags = parser.parse_known_args(words)
    return run_under_subreaper(functools.partial(_main, job, flags, options), prog=_PROG)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROG,
        usage=f"{_PROG} [{'|'.join(TRAINING)}] [flags of the rehearsal] FLAGS...",
        description=f"{(__doc__ or '').partition('Exit')[0].strip()} FLAGS are those of the command (default: rl).",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="write what was found to standard output as JSON")
    parser.add_argument(
        "--limit-s", type=positive, default=_LIMIT_S, help=f"seconds for all stages; default: {_LIMIT_S:g}"
    )
    parser.add_argument(
        "--gpu-memory",
        type=positive,
        metavar="GIB",
        help="the command is meant for GPUs of this memory: compare with it",
    )
    parser.add_argument(
        "--nodes", type=integer_from(1), help="the command is meant for so many nodes: find a place for its actors"
    )
    parser.add_argument("--gpus-per-node", type=integer_from(1), default=8, help="of these nodes; default: 8")
    return parser


def _main(job: str, flags: Sequence[str], options: argparse.Namespace, scratch: Path) -> int:
    say = functools.partial(print_lines, prog=_PROG)
    stages = Stages(options.limit_s, say)
    plan = list[str]()

    def body() -> None:
        try:
            _rehearse(job, flags, options, scratch, stages, plan)
        except CoatiError:
            if not stages.exit_code():
                raise

    code = exit_code_of(body, scratch, prog=_PROG)
    if code:
        return code
    if options.json:
        stages.write_json(job=job, plan=plan)
    else:
        sys.stdout.write("\n".join(["", *stages.table(), ""]))
    return stages.exit_code()


def _rehearse(
    job: str, flags: Sequence[str], options: argparse.Namespace, scratch: Path, stages: Stages, plan: list[str]
) -> None:
    """Run all stages, and append the lines of the plan to `plan`. Raises: CoatiError of the stage that fails."""
    with stages.stage("flags") as stage:
        config = _checked(job, flags)
        stage.finding = f"coati-rl {job}, rules and outputs"
    machine = TargetMachine(gpu_gib=options.gpu_memory, nodes=options.nodes, gpus_per_node=options.gpus_per_node)
    worker = ObjectInChild(lambda: Preparation(config, machine), scratch / "worker.log", when_late=SLOW)
    try:
        with stages.stage("preparation") as stage:
            found: Found = worker.call("prepare", timeout_s=stages.left_s(), what="the preparation of the real sizes")
            stage.finding = found.finding
            stage.warn(found.warnings)
            plan += found.plan
        with stages.stage("machines") as stage:
            stage.finding = _memory(found)
            worker.call("check_machines", timeout_s=stages.left_s(), what="comparing memory, disk and nodes")
        if isinstance(config, Config):
            with stages.stage("rewards") as stage:
                _try_rewards(worker, config, stages, stage)
        with stages.stage("small model") as stage:
            written: Written = worker.call(
                "write", scratch, timeout_s=stages.left_s(), what="the two-layer model and its configuration"
            )
            stage.finding = f"two layers of the architecture, {written.num_steps} steps to take"
            stage.warn(written.notes)
        _run(job, config, written, options, scratch, stages, worker)
    finally:
        worker.close()


def _checked(job: str, flags: Sequence[str]) -> TrainingConfig:
    """Return the command's configuration, as the command itself checks it. Raises: ConfigError."""
    config, _ = parse_job(flags, TRAINING[job])
    config = with_installed(config, functools.partial(print_lines, prog=_PROG))
    if isinstance(config, Config):
        check(config)
    else:
        check_offline(config)  # type: ignore[arg-type]
    probe_outputs(config)
    return config


def _memory(found: Found) -> str:
    """Return the forecast of the real sizes in one line."""
    lines = [line.partition("memory, ")[2] for line in found.plan if line.startswith("memory, ")]
    return "; ".join(" ".join(line.partition(":")[0].split()) for line in lines) or "is not forecast"


def _try_rewards(worker: ObjectInChild, config: Config, stages: Stages, stage: RehearsalStage) -> None:
    limit_s = min(_REWARDS_S, stages.left_s() / 4)
    tried = worker.call("try_rewards", limit_s, timeout_s=stages.left_s(), what="scoring rows of the dataset")
    if tried is None:
        stage.finding = "are given by a model or the environment: scored in the run"
        return
    stage.finding = tried.finding(config)
    if problem := tried.problem(config):
        raise RunError(problem)
    stage.warn([*tried.warnings()])


def _started_nodes(written: Written, options: argparse.Namespace, scratch: Path, stages: Stages) -> StandInNodes | None:
    """Start nodes that stand for those of --nodes; None for one, on which a run starts Ray itself."""
    wanted = min(options.nodes or 1, written.num_actors, _MAX_NODES)
    if wanted == 1 or not written.needs_ray:
        return None
    with stages.stage("nodes") as stage:
        cpus = max(-(-written.num_cpus // wanted), written.engine_cpus)
        nodes = start_nodes(wanted, cpus=cpus, directory=scratch, timeout_s=stages.left_s())
        stage.finding = f"{wanted} of Ray, of {count(cpus, 'CPU')} each"
        if wanted < options.nodes:
            stage.warn([f"--nodes {options.nodes} are rehearsed as {wanted}; the real ones were placed"])
    return nodes


def _run(
    job: str,
    config: TrainingConfig,
    written: Written,
    options: argparse.Namespace,
    scratch: Path,
    stages: Stages,
    worker: ObjectInChild,
) -> None:
    """Train two steps, resume from the first checkpoint, and load the last one."""
    command = CommandRun(
        job=job,
        config=written.config,
        log=scratch / "command.log",
        names=written.names | {str(scratch): "REHEARSAL"},
        temporary=str(scratch.parent),
        nodes=_started_nodes(written, options, scratch, stages),
    )
    run = RunDirectory
    with stages.stage("run") as stage:
        command.run(timeout_s=stages.left_s())
        stage.finding = finding(run(written.run_dir))
        stage.warn([*failures(run(written.run_dir), config)])
    with stages.stage("resume") as stage:
        first = written.run_dir / "checkpoints" / f"step-{written.first_save}"
        command.run("-cp", str(first), timeout_s=stages.left_s())
        stage.finding = f"from {first.name} to {run(written.run_dir).checkpoints()[-1].name}"
    with stages.stage("export") as stage:
        exported = [*_exported(written.run_dir)]
        loaded = [
            worker.call("load", each, timeout_s=stages.left_s(), what="loading a checkpoint") for each in exported
        ]
        stage.finding = f"loaded by transformers: {'; '.join(dict.fromkeys(loaded))}"


def _exported(run_dir: Path) -> Iterator[Path]:
    """Yield what other programs load: the last checkpoint, and a merged model if there is one."""
    found = RunDirectory(run_dir).checkpoints()
    if not found:
        raise ConfigError(f"{run_dir}: no checkpoint was written")
    yield found[-1]
    if (run_dir / "export").is_dir():
        yield run_dir / "export"
