"""Where scoring processes come from: requests flow in, processes that are ready to score come out in milliseconds.

The nursery is one process per pool. It makes the reward, imports its libraries (0.7 s for math) and then does nothing
but fork workers, kill them and collect their exit codes. As only their parent does so, no process id is mistaken.

It is a fresh interpreter, not a fork (the pool's process has an engine's threads) and no multiprocessing spawn (which
imports the parent's main module again, in an actor that is Ray). It has one thread, so that its forks are sound. A
reward that starts threads as it is made (a model on a GPU does) is not made here: each worker makes its own.

Wire: {"start" | "slow_down" | "kill": number of the worker} flows in, "start" with the worker's socket attached. Out
comes {"ready": true}, or {"error": why there is no reward} and the end. The nursery ends when its socket is closed.
"""

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NoReturn

from coati_rl.errors import ConfigError
from coati_rl.reward_spec import RewardSpec
from rewards.registry import make_reward
from rewards.reward import Reward, warm_up
from rewards.workers.worker import as_line, describe, die_with, serve

# Of a slow answer, on top of the pool's own. It gets a third of the time of a fresh one, so that these go first and
# yet, on a machine that is fully busy, an answer that takes a second still ends within the usual limit of 5 s.
SLOW_NICENESS = 5
_END_TIMEOUT_S = 2.0  # to kill the workers and collect them
_COLLECT_INTERVAL_S = 0.01  # while killed workers have not ended: large ones need a moment
_CONTROL_BUFFER = 4 << 20  # bytes of requests that wait while the reward is made, as far as the machine allows
_SPEC = "COATI_REWARD_SPEC"
_BODY = "from rewards.workers.nursery import main; main()"


class Nursery:
    """Handle of the process.

    It dies with the *thread* that made the handle: that is what PR_SET_PDEATHSIG watches. So make it on a thread that
    lives as long as the pool. SIGINT stays blocked in it, and in the workers, if that thread blocks SIGINT.
    """

    def __init__(self, spec: RewardSpec) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        import_path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        arguments = [str(theirs.fileno()), str(os.getpid()), "make"]
        # Not among the arguments, which anybody can read: a URL may hold a password.
        environment = {**os.environ, _SPEC: json.dumps(asdict(spec)), "PYTHONPATH": import_path, "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(  # -P: imports come from where the parent's do, see PYTHONPATH
                [sys.executable, "-P", "-c", _BODY, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # the parent's may carry results
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _CONTROL_BUFFER)
        ours.setblocking(False)
        self._control = ours
        self.is_ready = False

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def fileno(self) -> int:
        """The descriptor of our end, for a selector."""
        return self._control.fileno()

    def start_worker(self, number: int) -> socket.socket:
        """Have a worker forked as soon as the reward is made. Returns: our end of its socket, where it reports."""
        ours, theirs = socket.socketpair()
        with (
            theirs,
            suppress(BrokenPipeError, ConnectionResetError),
        ):  # a dead nursery: our end sees the end of the stream
            socket.send_fds(self._control, [as_line({"start": number})], [theirs.fileno()])
        return ours

    def slow_down(self, number: int) -> None:
        """Let other processes go before this worker."""
        self._send({"slow_down": number})

    def kill(self, number: int) -> None:
        """SIGKILL to a worker and what it has started: inside a big-integer power it listens to nothing else."""
        self._send({"kill": number})

    def receive(self) -> dict[str, Any]:
        """What the nursery has said; an empty dict when it has ended."""
        with suppress(ConnectionResetError):  # it has left requests unread: told once, before what it has said
            return self._receive()
        return self._receive()

    def close(self) -> int:
        """Kill all workers and the nursery and wait for their end. Returns: the nursery's exit code."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            return self._process.wait(_END_TIMEOUT_S if self.is_ready else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _receive(self) -> dict[str, Any]:
        message = self._control.recv(1 << 16)
        return json.loads(message) if message else {}

    def _send(self, message: dict[str, int]) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # a dead nursery: its workers die with it
            self._control.send(as_line(message))


def main() -> None:
    """The body of the process: RewardSpec in the environment, socket descriptor and parent's process id in argv."""
    spec, descriptor, parent_pid = RewardSpec(**json.loads(os.environ[_SPEC])), int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would collect workers behind our back
    die_with(parent_pid)
    control = socket.socket(fileno=descriptor)
    reward: Reward | None = None
    if sys.argv[3] == "make":
        try:
            reward = _make_warm(spec)
        except ConfigError as error:
            control.send(as_line({"error": describe(error)}))
            return
        except Exception as error:
            control.send(as_line({"error": describe(error)}))
            raise
        if len(os.listdir("/proc/self/task")) > 1:
            os.execv(sys.executable, [sys.executable, "-P", "-c", _BODY, *sys.argv[1:3], "leave it to the workers"])
    gc.collect()
    gc.freeze()  # what is here now is never collected: the workers' collections leave the shared pages shared
    control.send(as_line({"ready": True}))
    _Children(control, lambda: reward or _make_warm(spec)).look_after()


def _make_warm(spec: RewardSpec) -> Reward:
    reward = make_reward(spec)
    warm_up(reward)
    return reward


class _Children:
    """The workers of the nursery's process."""

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
            elif command == "slow_down" and number in self._pids:
                niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + SLOW_NICENESS, 19)
                with suppress(OSError):
                    os.setpriority(os.PRIO_PGRP, self._pids[number], niceness)
            elif command == "kill" and number in self._pids:
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
            die_with(parent_pid)
            serve(self._make, sock)
            exit_code = 0
        except BaseException:  # noqa: BLE001 - never back into the nursery's loop
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
