"""Run an agent's command, and kill all that it started when it ends, or when the producer does.

A process of the standard library alone, between the producer and the agent: `python -I -S agent_guard.py PRODUCER_ID
COMMAND...`. The agent has a process group of its own. The guard is a subreaper (prctl(2)), so that what the agent
leaves behind becomes its child and is killed; SIGTERM, which the kernel sends when the producer's thread dies, ends all
of them.

Exit code: the agent's; 128 + N if signal N killed it; 127 if the command cannot be run.
"""

import ctypes
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_NO_COMMAND = 127  # as a shell exits


def main() -> None:
    """Run the command in argv, after the process id of the producer, and exit with its code."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    awaited = {signal.SIGCHLD, signal.SIGTERM}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):  # it died before
        return
    guard = os.getpid()
    agent = os.fork()
    if agent == 0:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # if the guard is killed
        if os.getppid() != guard:
            os._exit(_NO_COMMAND)
        os.setsid()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask - awaited)
        _run(sys.argv[2:])
    code = None
    while code is None and signal.sigwait(awaited) == signal.SIGCHLD:
        code = _reap(agent)
    while _kill_children():
        signal.sigtimedwait({signal.SIGCHLD}, 0.1)
        ended = _reap(agent)
        code = ended if code is None else code
    code = code or 0
    os._exit(128 - code if code < 0 else code)


def _run(command: list[str]) -> NoReturn:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(_NO_COMMAND)


def _reap(agent: int) -> int | None:
    """Collect processes that have ended. Returns: the agent's code, -N for signal N, if it is one of them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == agent:
            code = os.waitstatus_to_exitcode(status)


def _kill_children() -> int:
    """Kill the children; theirs become ours. Returns: how many there were."""
    children = [int(name) for name in os.listdir("/proc") if name.isdecimal() and _parent_of(name) == os.getpid()]
    for pid in children:
        os.kill(pid, signal.SIGKILL)  # not collected yet, so that the number is still its own
    return len(children)


def _parent_of(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (OSError, IndexError):  # it has ended
        return 0


if __name__ == "__main__":
    main()
