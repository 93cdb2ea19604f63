"""Run in the processes of a pool: one makes the reward and forks workers, each worker scores responses.

The first is a fresh interpreter, not a fork (the pool's process has an engine's threads) and no multiprocessing
forkserver (which imports the parent's main module again, in an actor that is Ray). It has one thread, so that its forks
are sound. A reward that starts threads as it is made (a model on a GPU does) is not made there: each worker makes its
own.

The pool sends it {"start" | "kill": number of the worker}, "start" with the worker's socket attached. It sends
{"ready": true}, or {"error": why there is no reward} and ends. It ends, with all workers, when its socket is closed.

A worker sends {"ready": its process id}, or {"error": why there is no reward} and ends. Then each line that it gets is
[problem, responses], answered with a line per response, in order, each as soon as it is known. So the pool knows which
response is being scored at any time, and one that hangs costs itself only.

A worker whose reward only computes has little memory. What needs more is invalid: an allocation fails, or the peak
shows it afterwards (sympy goes on after a failed allocation, and might call the response wrong). Then the worker ends,
because its memory may not come back.
"""

import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from typing import NoReturn

from coati_rl.errors import ConfigError
from coati_rl.reward_spec import RewardSpec
from coati_rl.text import shorten
from coati_rl.types import Problem, Score
from rewards.registry import make_reward
from rewards.reward import Reward, invalid_score, only_computes, warm_up

BODY = "from rewards.workers.worker_process import main; main()"
SPEC_VARIABLE = "COATI_REWARD_SPEC"
_COLLECT_INTERVAL_S = 0.01  # while killed workers have not ended: large ones need a moment
_PR_SET_PDEATHSIG = 1
MIB = 1 << 20
MAX_PEAK_BYTES = 128 * MIB  # that a response may add to the memory in use; ordinary answers add 12 MiB in all
_MAX_ADDRESS_SPACE_BYTES = 512 * MIB  # that a worker may add to its address space


def main() -> None:
    """The body of the first process: RewardSpec in the environment, socket and parent's process id in argv."""
    spec, descriptor, parent_pid = (
        RewardSpec(**json.loads(os.environ[SPEC_VARIABLE])),
        int(sys.argv[1]),
        int(sys.argv[2]),
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would collect workers behind our back
    _die_with(parent_pid)
    control = socket.socket(fileno=descriptor)
    reward: Reward | None = None
    if sys.argv[3] == "make":
        try:
            reward = _make_warm(spec)
        except ConfigError as error:
            control.send(as_line({"error": _describe(error)}))
            return
        except Exception as error:
            control.send(as_line({"error": _describe(error)}))
            raise
        if len(os.listdir("/proc/self/task")) > 1:
            os.execv(sys.executable, [sys.executable, "-P", "-c", BODY, *sys.argv[1:3], "leave it to the workers"])
    gc.collect()
    gc.freeze()  # what is here now is never collected: the workers' collections leave the shared pages shared
    control.send(as_line({"ready": True}))
    _Children(control, lambda: reward or _make_warm(spec)).look_after()


def as_line(message: object) -> bytes:
    """A message as it travels."""
    return json.dumps(message).encode() + b"\n"


class _Children:
    """The workers, in the process that they are forked from."""

    def __init__(self, control: socket.socket, make: Callable[[], Reward]) -> None:
        self._control = control
        self._make = make
        self._pids: dict[int, int] = {}  # by number; each is killed and collected exactly once
        self._ending: list[int] = []  # killed, not collected yet

    def look_after(self) -> None:
        """Do what the pool asks for until it closes its end; nobody is left then."""
        while True:
            has_message, _, _ = select.select([self._control], [], [], _COLLECT_INTERVAL_S if self._ending else None)
            self._ending = [pid for pid in self._ending if os.waitpid(pid, os.WNOHANG)[0] == 0]
            if not has_message:
                continue
            message, descriptors, _, _ = socket.recv_fds(self._control, 1024, 1)
            if not message:
                break
            ((command, number),) = json.loads(message).items()
            if command == "start":
                sock = socket.socket(fileno=descriptors[0])
                sock.set_inheritable(False)  # what a reward starts has no business with it
                self._start(number, sock)
            elif number in self._pids:
                self._kill(number)
        for number in list(self._pids):
            self._kill(number)
        for pid in self._ending:
            os.waitpid(pid, 0)

    def _start(self, number: int, sock: socket.socket) -> None:
        with sock:
            parent_pid = os.getpid()
            try:
                pid = os.fork()
            except OSError as error:
                sock.send(as_line({"error": f"no further process: {error}"}))
                return
            if pid == 0:
                self._become_worker(parent_pid, sock)
            with suppress(OSError):
                os.setpgid(pid, pid)  # the worker does so too: whoever is first
            self._pids[number] = pid

    def _become_worker(self, parent_pid: int, sock: socket.socket) -> NoReturn:
        exit_code = 1
        try:
            self._control.close()
            os.setpgid(0, 0)  # what a reward starts ends with its worker
            _die_with(parent_pid)
            _serve(self._make, sock)
            exit_code = 0
        except BaseException:  # noqa: BLE001 - never back into the loop of `look_after`
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(exit_code)

    def _kill(self, number: int) -> None:
        pid = self._pids.pop(number)
        with suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        self._ending.append(pid)


def _serve(make: Callable[[], Reward], sock: socket.socket) -> None:
    """Score what arrives until the pool closes its end."""
    try:
        reward = make()
    except Exception as error:
        sock.sendall(as_line({"error": _describe(error)}))
        raise
    max_peak_bytes = _limit_memory() if only_computes(reward) else None
    try:
        sock.sendall(as_line({"ready": os.getpid()}))
        with sock.makefile("rb") as lines:
            for line in lines:
                problem, responses = json.loads(line)
                for score in _scores(reward, responses, Problem(**problem)):
                    is_too_large = max_peak_bytes is not None and _peak_bytes() > max_peak_bytes
                    sock.sendall(as_line(asdict(_too_large() if is_too_large else score)))
                    if is_too_large:
                        return
    except OSError:
        return  # the pool closed its end


def _limit_memory() -> int:
    """Limit what this process may take in addition. Returns: the peak of resident memory that is too much."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        size, resident = (int(pages) * resource.getpagesize() for pages in file.read().split()[:2])
    limit = size + _MAX_ADDRESS_SPACE_BYTES
    resource.setrlimit(
        resource.RLIMIT_AS, (limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit), hard_limit)
    )
    return resident + MAX_PEAK_BYTES


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _too_large() -> Score:
    return invalid_score(f"took more than {MAX_PEAK_BYTES // MIB} MiB of memory")


def _scores(reward: Reward, responses: Sequence[str], problem: Problem) -> Iterator[Score]:
    """One score per response, also of a reward that gives another number of them: the pool counts on it."""
    if not reward.is_batch:
        yield from islice(reward.score(responses, problem), len(responses))
        return
    scores = list(reward.score(responses, problem))
    if len(scores) != len(responses):
        scores = [invalid_score(f"the reward gave {len(scores)} scores for {len(responses)} responses")]
        scores *= len(responses)
    yield from scores


def _make_warm(spec: RewardSpec) -> Reward:
    reward = make_reward(spec)
    warm_up(reward)
    return reward


def _die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent is killed (Linux)."""
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the call above: no signal will come
        os._exit(1)


def _describe(error: Exception) -> str:
    """Why a reward could not be made, on one line; a ConfigError's message is complete by itself."""
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {shorten(error, 300)}"
