"""Run an agent's command to its end, in a process group of its own, for as long as its episode may take.

In: a command, its environment variables, the text of its standard input. Out: why it failed, if it did. Nothing that it
started is left when this returns: see agent_guard.py.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_GUARD = Path(__file__).parent / "agent_guard.py"
_TAIL = 4096  # bytes of error output that are kept
_KILL_TIMEOUT_S = 5.0  # for the guard to kill all processes
_SIGNALLED = 128  # added to the number of the signal that killed it, by the guard as by a shell
_LINE = 300  # characters of the last line of error output


async def run_agent(
    command: Sequence[str], *, environment: Mapping[str, str], task: Path, timeout_s: float
) -> str | None:
    """Run the command. Returns: None if it ended with exit code 0, else one line that says how it failed.

    Cancelled, it kills the agent first.

    Args:
        command: the program and its arguments.
        environment: its variables, all of them.
        task: a file that it reads as its standard input.
        timeout_s: after which it is killed, seconds.
    """
    with task.open("rb") as stdin:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            str(_GUARD),
            str(os.getpid()),
            *command,
            stdin=stdin,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )
    errors = asyncio.ensure_future(_last_line(process))
    late = ""
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        late = f"not done within {timeout_s:g} s"
    finally:
        await asyncio.shield(_end(process))
    try:
        async with asyncio.timeout(_KILL_TIMEOUT_S):  # what holds it open is dead
            line = await errors
    except TimeoutError:
        line = ""
        process._transport.close()  # type: ignore[attr-defined]  # closes itself only at the end of the error output
    return _failure(process.returncode, line, late)


def _failure(code: int | None, line: str, late: str) -> str | None:
    if code == 0 and not late:
        return None
    how = late or f"exit code {code}"
    if not late and code is not None and code > _SIGNALLED:
        how = f"it was killed by {_signal_name(code - _SIGNALLED)}"
    return f"{how}: {line}" if line else how


async def _end(process: asyncio.subprocess.Process) -> None:
    """Have the guard kill what is left; kill the guard if it does not end."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.send_signal(number)
            with suppress(TimeoutError):
                async with asyncio.timeout(_KILL_TIMEOUT_S):
                    await process.wait()


async def _last_line(process: asyncio.subprocess.Process) -> str:
    """Read the error output to its end. Returns: its last line that is not empty, shortened."""
    stream, tail = process.stderr, b""
    while stream is not None and (read := await stream.read(1 << 16)):
        tail = (tail + read)[-_TAIL:]
    lines = [line.strip() for line in tail.decode(errors="replace").splitlines()]
    return next((line[:_LINE] for line in reversed(lines) if line), "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
