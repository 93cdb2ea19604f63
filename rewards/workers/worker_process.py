"""Make the reward and fork workers in the fork server, and score responses in the workers.

The fork server is a fresh interpreter, not a fork (the pool's process has an engine's threads) and not that of
multiprocessing (which imports the parent's main module again; in an actor that is Ray). It has one thread, so that
forking is safe. A reward that starts threads when it is made (such as a model on a GPU) is made in each worker instead.

The pool sends it {"start" | "kill": number of the worker}, "start" with the worker's socket attached. It sends
{"ready": true}, or {"error": cause} and ends. It ends, with all workers, when its socket is closed.

A worker sends {"ready": its process id}, or {"error": cause} and ends. Then it reads lines [problem, responses] and
writes a line per response, in order, each as soon as it is known. Therefore the pool always knows which response is
being scored, and one that hangs affects no other.

A worker whose reward only computes has limited memory. A response that needs more is invalid: an allocation fails, or
the peak is found afterwards (sympy continues after a failed allocation, and might call the response wrong). Then the
worker ends, because its memory may not be released.
"""

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
from coati_rl.processes.ending import end_with_parent
from coati_rl.reward_spec import RewardSpec
from coati_rl.text import shorten
from coati_rl.types import Problem, Score
from rewards.registry import make_reward
from rewards.reward import Reward, invalid_score, only_computes, warm_up

BODY = "from rewards.workers.worker_process import main; main()"
SPEC_VARIABLE = "COATI_REWARD_SPEC"
_COLLECT_INTERVAL_S = 0.01  # poll interval while killed workers have not ended
MIB = 1 << 20
MAX_PEAK_BYTES = 128 * MIB  # resident memory that a worker may add; ordinary answers add 12 MiB in total
_MAX_ADDRESS_SPACE_BYTES = 512 * MIB  # address space that a worker may add


def main() -> None:
    """Run the fork server, with a RewardSpec in the environment and its socket and parent's process id in argv."""
    spec, descriptor, parent_pid = (
        RewardSpec(**json.loads(os.environ[SPEC_VARIABLE])),
        int(sys.argv[1]),
        int(sys.argv[2]),
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, the kernel would reap workers
    end_with_parent(parent_pid)
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
    gc.freeze()  # objects that exist now are never collected, so that the workers' pages stay shared
    control.send(as_line({"ready": True}))
    _Workers(control, lambda: reward or _make_warm(spec)).serve()


def as_line(message: object) -> bytes:
    """Encode a message as a line of JSON."""
    return json.dumps(message).encode() + b"\n"


class _Workers:
    """Fork, kill and collect the workers, in the fork server."""

    def __init__(self, control: socket.socket, make: Callable[[], Reward]) -> None:
        self._control = control
        self._make = make
        self._pids: dict[int, int] = {}  # by number; each is killed and collected exactly once
        self._ending: list[int] = []  # killed, not collected yet

    def serve(self) -> None:
        """Execute the pool's requests until it closes its end, then kill and collect all workers."""
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
                sock.set_inheritable(False)  # child processes of a reward must not get it
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
                sock.send(as_line({"error": f"a worker cannot be forked: {error}"}))
                return
            if pid == 0:
                self._become_worker(parent_pid, sock)
            with suppress(OSError):
                os.setpgid(pid, pid)  # also called in the worker, since either may be first
            self._pids[number] = pid

    def _become_worker(self, parent_pid: int, sock: socket.socket) -> NoReturn:
        exit_code = 1
        try:
            self._control.close()
            os.setpgid(0, 0)  # child processes of a reward are killed with its worker
            end_with_parent(parent_pid)
            _serve(self._make, sock)
            exit_code = 0
        except BaseException:  # noqa: BLE001 - a fork must not return into the loop of `serve`
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
    """Score requests until the pool closes its end."""
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
    """Limit the additional memory of this process. Returns: the allowed peak of resident memory, in bytes."""
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
    """Yield exactly one score per response, also if the reward returns another number."""
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


def _describe(error: Exception) -> str:
    """Return the error on one line; the message of a ConfigError needs no type name."""
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {shorten(error, 300)}"
