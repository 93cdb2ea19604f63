"""Run an agent's command to its end, in a process group of its own, for as long as its episode may take.

In: a command, its environment variables, the text of its standard input. Out: why it failed, if it did. Nothing that it
started is left when this returns: see agent_guard.py.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

_GUARD = Path(__file__).parent / "agent_guard.py"
_HEAD, _TAIL = 16_384, 49_152  # bytes of error output that are kept, of its beginning and its end
_KILL_TIMEOUT_S = 5.0  # for the guard to kill all processes
_SIGNALLED = 128  # added to the number of the signal that killed it, by the guard as by a shell
_LINE = 300  # characters of the last line of error output


async def run_agent(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    task: Path,
    timeout_s: float,
    errors: Path | None = None,
) -> str | None:
    """Run the command. Returns: None if it ended with exit code 0, else one line that says how it failed.

    Cancelled, it kills the agent first.

    Args:
        command: the program and its arguments.
        environment: its variables, all of them.
        task: a file that it reads as its standard input.
        timeout_s: after which it is killed, seconds.
        errors: a file for its error output, shortened in the middle if it is long; not written if there is none.
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
    output = _ErrorOutput()
    reading = asyncio.ensure_future(output.read(process))
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
                await reading
        except TimeoutError:
            process._transport.close()  # type: ignore[attr-defined]  # closes itself only at the end of the output
        if errors is not None:
            output.write(errors)
    return _failure(process.returncode, output.last_line(), late)


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


class _ErrorOutput:
    """Keep the beginning and the end of an agent's error output."""

    def __init__(self) -> None:
        self._head = self._tail = b""
        self._num_left_out = 0  # bytes

    async def read(self, process: asyncio.subprocess.Process) -> None:
        """Read to the end."""
        stream = process.stderr
        while stream is not None and (read := await stream.read(1 << 16)):
            room = _HEAD - len(self._head)
            self._head += read[:room]
            tail = self._tail + read[room:]
            self._num_left_out += max(0, len(tail) - _TAIL)
            self._tail = tail[-_TAIL:]

    def write(self, path: Path) -> None:
        """Write what was kept; what the disk refuses is left out, as the episode itself is sound."""
        if not self._head:
            return
        cut = f"\n[... {self._num_left_out} bytes left out ...]\n".encode() if self._num_left_out else b""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self._head + cut + self._tail)
        except OSError as error:
            path.unlink(missing_ok=True)
            logger.warning("an agent's error output is not kept in %s: %s", path, error.strerror)

    def last_line(self) -> str:
        """Return the last line that is not empty, shortened."""
        lines = [line.strip() for line in (self._tail or self._head).decode(errors="replace").splitlines()]
        return next((line[:_LINE] for line in reversed(lines) if line), "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
