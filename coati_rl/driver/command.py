"""Run a training command in the driver: its plan or its launch, its messages, its exit code.

Exit code: 0 success, 1 the run failed, 2 invalid arguments (nothing was started), 130 interrupted.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from coati_rl.errors import CoatiError, ConfigError
from coati_rl.preflight.checkpoint_disk import checkpoint_lines
from coati_rl.preflight.prepared import PreparedJob
from coati_rl.processes.actor_classes import ActorClasses
from coati_rl.processes.exit_messages import PROG, print_lines, read_note
from coati_rl.processes.freed_memory import return_freed_memory
from coati_rl.processes.ray_environment import check_session_path, prepare_ray_environment
from coati_rl.processes.run_dir import RunPaths
from coati_rl.processes.slow_phase import slow_phase


def exit_code_of(body: Callable[[], None], scratch: Path, *, prog: str = PROG) -> int:
    """Run a command, report its error, and return its exit code.

    Args:
        body: parses, checks and runs the command.
        scratch: its temporary directory.
        prog: the program's name in messages.
    """
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger().handlers[0].setLevel(logging.WARNING)  # the rest goes to the run's driver.log
    try:
        body()
        return 0
    except ConfigError as error:
        print_lines(str(error), prog=prog)
        return 2
    except CoatiError as error:
        resume = read_note(scratch).how_to_resume()
        print_lines(f"the run failed: {' '.join(str(error).split())}{resume}", prog=prog)
        return 1
    except KeyboardInterrupt as interrupt:
        problem = f"; {interrupt}" if str(interrupt) else ""
        print_lines(f"interrupted; everything was stopped{problem}{read_note(scratch).how_to_resume()}", prog=prog)
        return 130


def plan_or_launch(
    prepared: PreparedJob,
    classes: Callable[[], ActorClasses],
    *,
    warnings: Iterable[str],
    is_dry_run: bool,
    scratch: Path,
    sample: Callable[[], Iterable[str]] = tuple,
    finish: Callable[[RunPaths], Iterable[str]] = lambda _: (),
) -> None:
    """Print warnings, then the plan of a dry run, or run the job to its end.

    Args:
        prepared: the job.
        classes: called for a run only, as it imports Ray and the engines.
        warnings: for people, one a line.
        is_dry_run: print the plan and return.
        scratch: temporary directory for sockets.
        sample: called in a dry run; returns the lines that show what is trained on.
        finish: called after the run, with its paths; returns what to say of what it has done.
    Raises: CoatiError; KeyboardInterrupt.
    """
    say = partial(print_lines, prog=prepared.config.prog())
    for warning in (*warnings, *_short_data(prepared)):
        say(f"warning: {warning}")
    if is_dry_run:
        lines = [*prepared.plan.lines(), *checkpoint_lines(prepared.config, prepared.plan), *sample()]
        if prepared.resume is not None:
            lines += [prepared.resume.line(), *prepared.resume.changes]
        _print("\n".join(lines))
        return
    libraries = "the trainers' libraries"
    if prepared.config.needs_ray:
        if not prepared.config.cluster.master_address:
            check_session_path(scratch)
        prepare_ray_environment(prepared.config)
        libraries = f"Ray and {libraries}"
    with slow_phase(f"starting: {libraries} are loaded", say):
        # Imported here, so that errors on the command line are reported before Ray, vLLM and ColossalAI are loaded.
        from coati_rl.driver.launch import launch

        actor_classes = classes()
    return_freed_memory()  # of the preparations, such as the model that was tried
    paths = launch(prepared, actor_classes, scratch=scratch)
    for line in finish(paths):
        say(line)
    _print(f"done: {paths.run_dir}{read_note(scratch).how_to_train_on()}")


def _short_data(prepared: PreparedJob) -> Iterator[str]:
    """Yield a warning if the data ends before --max-steps."""
    wanted, planned = prepared.config.setting("max_steps", None), prepared.plan.num_steps
    if wanted is not None and planned is not None and planned < wanted:
        yield f"--max-steps {wanted}: the data ends after {planned}; raise {prepared.config.PASSES} (-e)"


def _print(text: str) -> None:
    with suppress(OSError):  # the terminal, or the pipe, may be closed
        print(text, flush=True)  # noqa: T201, the command's output
