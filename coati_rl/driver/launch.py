"""Run a prepared configuration: start the actors, watch them, write records and progress, and end them."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from coati_rl.checkpoint.ledger_files import LEDGER
from coati_rl.checkpoint.ledger_frames import LedgerError
from coati_rl.checkpoint.resumed_run import ResumedRun
from coati_rl.config import Config
from coati_rl.config.thresholds import common_threshold
from coati_rl.config.training import TrainingConfig
from coati_rl.coordinator.take_over import STEP_OF, unread_events
from coati_rl.disk import disk_errors, disk_problem
from coati_rl.driver.closing import closing_lines
from coati_rl.driver.event_recorder import EventRecorder
from coati_rl.driver.loading import LoadingLines
from coati_rl.driver.supervisor import Supervisor
from coati_rl.errors import CoatiError, RunError
from coati_rl.observability.progress import ProgressDisplay
from coati_rl.observability.records import events_in
from coati_rl.observability.sampled_answer import AnswerReader
from coati_rl.observability.sinks import METRICS, SYNCS, JsonlSink, Sink, open_sinks
from coati_rl.observability.terminal_streams import can_draw
from coati_rl.observability.timeline import Timeline
from coati_rl.observability.trace_file import merged_at_exit
from coati_rl.preflight.prepared import PreparedJob
from coati_rl.processes.actor_classes import ActorClasses
from coati_rl.processes.actor_process import LOG_FORMAT
from coati_rl.processes.exit_messages import RunNote, command_here, write_note
from coati_rl.processes.held_port import held_port
from coati_rl.processes.interrupts import recorded_interrupts
from coati_rl.processes.join_address import check_join_secrets, join_port_held, join_url, write_token
from coati_rl.processes.run_dir import RunPaths, checkpoint_bytes, locked, make_run_dir
from coati_rl.processes.shared_memory import family, unlink_mapped
from coati_rl.run_reader.json_lines import read_json_lines

logger = logging.getLogger(__name__)

_END_S = 5.0  # of the grace period: for actors, Ray and files to be closed


def launch(prepared: PreparedJob, classes: ActorClasses, *, scratch: Path) -> RunPaths:
    """Run the training to its end.

    Args:
        prepared: of a `Preparation`.
        classes: the actors' classes.
        scratch: short path for Ray's sockets and logs, removed by the caller.
    Returns: the paths of the run's files.
    Raises: ConfigError before anything started; RunError with its cause and the logs' path.
    """
    with ports_held(prepared.config):
        return _launch(prepared, classes, scratch=scratch)


def _launch(prepared: PreparedJob, classes: ActorClasses, *, scratch: Path) -> RunPaths:
    """Do the same, once nobody else can take the run's ports."""
    config, plan = prepared.config, prepared.plan
    paths = make_run_dir(config, prepared.resume, checkpoint_bytes=checkpoint_bytes(config, plan.precision))
    write_note(scratch, _note(prepared, paths))
    first_step = prepared.resume.step if prepared.resume else 0
    try:
        with (
            _driver_log(paths.logs / "driver.log") as log,
            _records(config, paths.run_dir, first_step=first_step) as (sinks, syncs),
            locked(paths.run_dir),
            merged_at_exit(paths.run_dir),  # after all writers have ended
            closing(Timeline(paths.run_dir / "timeline", "driver", has_descendants=False)) as timeline,
            _display(prepared, paths) as display,
            _place_of(prepared)(prepared, paths, classes, scratch=scratch, on_status=display.show_wait) as make_actors,
        ):
            loading = LoadingLines(config)
            recorder = EventRecorder(
                display=display,
                loading=loading,
                sinks=sinks,
                syncs=syncs,
                answers=_answers(config, paths, first_step),
                run_dir=paths.run_dir,
            )
            if prepared.resume is not None:
                _write_unread(prepared.resume.step, recorder, paths.run_dir)
            _introduce(prepared, paths, display)
            actors = make_actors()
            supervisor = Supervisor(
                actors,
                lambda event: recorder.record(_with_timeline_event(event, timeline, log)),
                num_producers=config.num_producers,
                max_producers=config.setting("max_producers", None),
                takes_joining=config.setting("join_port", None) is not None,
                stall_timeout_s=config.cluster.stall_timeout_s,
                on_status=display.show_wait,
            )
            try:
                actors.start(lambda text: display.show_wait(loading.with_model(text)))
                display.print_line(loading.trainers())
                _watch(supervisor, config)
                _report_data_ended(config, display)
            finally:
                supervisor.flush_records()
                unlink_mapped(family())  # of engines that are still loading, which are killed now
                actors.end()
    except RunError as error:
        raise RunError(f"{error} (logs: {paths.logs})") from error
    return paths


def _write_unread(step: int, recorder: EventRecorder, run_dir: Path) -> None:
    """Write what the last driver of a resumed run had not read when it was killed; some of it may be in the files."""
    written = {("step", record["step"]) for record in read_json_lines(run_dir / METRICS, skips_damaged=True)}
    written |= {("sync", record["step"]) for record in read_json_lines(run_dir / SYNCS, skips_damaged=True)}
    try:
        unread = unread_events(run_dir / LEDGER, step)
    except LedgerError as error:  # a run that needs the ledger is refused before
        logger.warning("steps and weight syncs that were not read before the kill are not written: %s", error)
        return
    for event in unread:
        if (event["event"], event[STEP_OF[event["event"]]]) not in written:
            recorder.write(event)


def _display(prepared: PreparedJob, paths: RunPaths) -> ProgressDisplay:
    return ProgressDisplay(
        prepared.plan.num_steps,
        first_step=prepared.resume.step if prepared.resume else 0,
        threshold=common_threshold(prepared.config),
        is_plain=prepared.config.run.plain or not can_draw(sys.stdout),
        closing=partial(closing_lines, prepared.config, paths),
    )


def _answers(config: TrainingConfig, paths: RunPaths, first_step: int) -> AnswerReader:
    every = getattr(config.run, "answer_interval", -1)  # a job on a dataset has none
    return AnswerReader(paths.rollouts, every=every if every > 0 else None, first_step=first_step)


def _place_of(prepared: PreparedJob) -> Callable[..., AbstractContextManager[Callable[[], Any]]]:
    """Return what provides a place for the actors and yields the function that creates them there."""
    if prepared.config.needs_ray:
        from coati_rl.runtime.actor_group import in_ray  # imports Ray

        return in_ray
    from coati_rl.driver.local_actors import on_this_machine

    return on_this_machine


@contextmanager
def ports_held(config: TrainingConfig) -> Iterator[None]:
    """Hold the ports that flags name, so that they are the run's from before anything is made until it ends.

    In a cluster that runs, workers may be another user's and could not share them: there --join-port is only looked at.
    Raises: ConfigError if another program has one.
    """
    cluster = config.cluster
    with ExitStack() as held:
        if cluster.master_port and not cluster.master_address:
            flags, remedy = f"--master_port {cluster.master_port}", "use --master_port 0 for a free port"
            held.enter_context(held_port("127.0.0.1", cluster.master_port, flags=flags, remedy=remedy))
        if isinstance(config, Config) and config.parallel.join_port is not None:
            check_join_secrets(config.parallel)
            held.enter_context(join_port_held(config.parallel))
            if cluster.master_address:
                held.close()
        yield


def _introduce(prepared: PreparedJob, paths: RunPaths, display: ProgressDisplay) -> None:
    """Print where the run is, what it resumes, and the command that joins it, whose token is written."""
    config = prepared.config
    display.print_line(f"run directory {paths.run_dir}")
    if prepared.resume is not None:
        display.recall(events_in(paths.run_dir / METRICS, paths.evaluation))
        _report_resumption(prepared.resume, display)
    if isinstance(config, Config) and config.parallel.join_port is not None:
        token = write_token(paths.run_dir)
        display.print_line(f"to join: coati-rl join {join_url(config.parallel)} --token-file {token}")


def _report_data_ended(config: TrainingConfig, display: ProgressDisplay) -> None:
    """Say why a run that was not interrupted has taken fewer steps than --max-steps."""
    wanted, taken = config.setting("max_steps", None), display.last_step
    if wanted is not None and taken is not None and taken < wanted:
        display.print_line(
            f"the run ended at step {taken} of --max-steps {wanted}: the data is used up; raise {config.PASSES} (-e)"
        )


def _note(prepared: PreparedJob, paths: RunPaths) -> RunNote:
    return RunNote(
        run_dir=paths.run_dir.absolute(),
        checkpoints=paths.checkpoints.absolute(),
        resumed_from=prepared.resume.directory.absolute() if prepared.resume else None,
        grace_s=prepared.config.run.interrupt_grace_s,
        command=command_here(prepared.config.COMMAND),
        to_train_on=prepared.config.PASSES,
    )


def _watch(supervisor: Supervisor, config: TrainingConfig) -> None:
    """Watch the run until it ends; after a signal, save a checkpoint within the grace period.

    Raises: KeyboardInterrupt after a signal, with the reason if the last step was not saved; RunError.
    """
    save_s = max(config.run.interrupt_grace_s - _END_S, config.run.interrupt_grace_s / 2)
    with recorded_interrupts() as interrupted_at:
        try:
            supervisor.run(interrupted_at)
            if (signal_s := interrupted_at()) is not None and config.run.save_on_interrupt:
                supervisor.save(deadline=signal_s + save_s)
        except RunError as error:
            if interrupted_at() is None:
                raise
            raise KeyboardInterrupt(f"no checkpoint of the last step: {error}") from error
        if interrupted_at() is not None:
            raise KeyboardInterrupt


class _LogFile(logging.FileHandler):
    """Write a log file, and keep an error of the disk in `problem` instead of raising it."""

    problem: str | None = None

    def handleError(self, record: logging.LogRecord) -> None:
        """Record the error; called in an `except` block of the logging module."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self.problem = disk_problem(Path(self.baseFilename), error)
        else:
            super().handleError(record)

    def close(self) -> None:
        """Close the file; lines that could not be written are lost."""
        with suppress(OSError):
            super().close()


@contextmanager
def _driver_log(path: Path) -> Iterator[_LogFile]:
    """Write the driver's log to a file for the time of the block."""
    with disk_errors(path):
        log = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    log.setFormatter(logging.Formatter(LOG_FORMAT))
    logger_of_all = logging.getLogger("coati_rl")
    logger_of_all.addHandler(log)
    logger_of_all.setLevel(logging.INFO)
    try:
        yield log
    except (CoatiError, KeyboardInterrupt) as error:  # the terminal has it from the command
        text = (
            "interrupted" if isinstance(error, KeyboardInterrupt) else f"the run failed: {' '.join(str(error).split())}"
        )
        log.handle(logger.makeRecord(logger.name, logging.ERROR, "", 0, "%s", (text,), None))
        raise
    finally:
        logger_of_all.removeHandler(log)
        log.close()


@contextmanager
def _records(config: TrainingConfig, run_dir: Path, *, first_step: int) -> Iterator[tuple[list[Sink], Sink]]:
    """Open the sinks of step records, and that of weight syncs."""
    with ExitStack() as files:
        sinks = open_sinks(config, run_dir, first_step=first_step)
        syncs = JsonlSink(run_dir / SYNCS)
        for sink in [*sinks, syncs]:
            files.push(partial(_close, sink))
        yield sinks, syncs


def _close(sink: Sink, error_type: type[BaseException] | None, *_: object) -> None:
    """Close a sink as a context does; `error_type`: of what ended the run, None if it came to its end."""
    sink.close(has_failed=error_type is not None)


def _report_resumption(resume: ResumedRun, display: ProgressDisplay) -> None:
    for line in (resume.line(), *resume.changes):
        display.print_line(line)


def _with_timeline_event(event: dict[str, Any], timeline: Timeline, log: _LogFile) -> dict[str, Any]:
    if problem := timeline.problem or log.problem:
        raise RunError(problem)
    names = ("step", "policy_version", "producer", "uid", "task", "cause")
    timeline.instant(event["event"], **{name: event[name] for name in names if name in event})
    return event
