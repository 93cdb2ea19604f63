"""Run an agent's command to its end, in a process group of its own, for as long as its episode may take.

In: a command, its environment variables, the text of its standard input. Out: why it failed, if it did. Nothing that it
started is left when this returns: see agent_guard.py.
"""

import asyncio
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_GUARD = Path(__file__).parent / "agent_guard.py"
_TAIL = 4096  # bytes of error output that are kept
_KILL_TIMEOUT_S = 5.0  # for the guard to kill all processes
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
            *command,
            stdin=stdin,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )
    tail = asyncio.ensure_future(_last_line(process))
    is_late = False
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        is_late = True
    finally:
        await _end(process)
        tail.cancel() if process.returncode is None else None
    with suppress(asyncio.CancelledError):
        return _failure(process.returncode, await tail, f"it took more than {timeout_s:g} s" if is_late else "")
    return "it cannot be killed"


def _failure(code: int | None, line: str, late: str) -> str | None:
    if code == 0 and not late:
        return None
    how = late or (f"it was killed by {_signal_name(code - 128)}" if (code or 0) > 128 else f"exit code {code}")
    return f"{how}: {line}" if line else how
