"""One scoring process: its body, which runs there, and its handle, which the pool holds.

Wire, both ways JSON messages over one socket: the child says "ready"; the handle sends the responses of a chunk with
their ground truth; the child answers with one score per response, in order, each as soon as it is known. So the pool
knows which response is being scored at any time, and one that hangs costs itself only.

The child is a fresh interpreter, not a fork (the parent has an engine's threads) and not a multiprocessing spawn (which
imports the parent's main module again, in an actor that is Ray). Run `serve` there; nothing else belongs in it.
"""

import ctypes
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from time import monotonic

from coati_rl.types import Score
from rewards.math_answer import shorten
from rewards.registry import RewardFn, get_reward

START_TIMEOUT_S = 60.0  # imports take 0.5 s on an idle core; this is for a machine that is loading models
_SEND_TIMEOUT_S = 2  # per write; a child that does not read is stopped
_PR_SET_PDEATHSIG = 1


class WorkerDiedError(Exception):
    """The process ended, or does not take part in the conversation any more."""


class WorkerTimeoutError(Exception):
    """The process did not answer in time."""


class WorkerProcess:
    """Handle of one scoring process. Used by one thread, but for `kill`, which any thread may call.

    The process dies with the *thread* that made the handle: that is what PR_SET_PDEATHSIG watches. So make it on a
    thread that lives as long as the process is wanted. SIGINT stays blocked in it if that thread blocks SIGINT.
    """

    def __init__(self, reward_name: str) -> None:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT_S, 0))
        import_path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        body = "from rewards.worker import serve; serve()"
        arguments = [reward_name, str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(  # -P: imports come from where the parent's do, see PYTHONPATH
                [sys.executable, "-P", "-c", body, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # the parent's may carry results
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": import_path, "OMP_NUM_THREADS": "1"},
            )
        self._channel = Connection(ours.detach())
        self._is_ready = False
        self._start_deadline = monotonic() + START_TIMEOUT_S

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """False once the process has ended."""
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Wait for the imports of a new process; returns at once later.

        Raises: WorkerDiedError; WorkerTimeoutError START_TIMEOUT_S after the start.
        """
        if not self._is_ready:
            self._receive(self._start_deadline - monotonic())
            self._is_ready = True

    def send(self, responses: Sequence[str], ground_truth: str) -> None:
        """Ask for the scores of `responses`; call `receive` once for each before the next `send`.

        Raises: WorkerDiedError.
        """
        try:
            self._channel.send_bytes(json.dumps([list(responses), ground_truth]).encode())
        except OSError as error:
            raise WorkerDiedError(str(error)) from error

    def receive(self, timeout_s: float) -> Score:
        """The next score, in the order of the responses.

        Raises: WorkerDiedError, also for an answer that is no score; WorkerTimeoutError after `timeout_s`.
        """
        message = self._receive(timeout_s)
        try:
            return Score(**json.loads(message))
        except (TypeError, ValueError) as error:
            raise WorkerDiedError(f"not a score: {shorten(message)}") from error

    def kill(self) -> None:
        """SIGKILL: a process inside a big-integer power listens to nothing else."""
        self._process.kill()

    def close(self) -> int:
        """Kill the process, wait for its end and return its exit code (negative: the signal)."""
        self._process.kill()
        self._channel.close()
        return self._process.wait()

    def _receive(self, timeout_s: float) -> bytes:
        try:
            if not self._channel.poll(max(timeout_s, 0.0)):
                raise WorkerTimeoutError
            return self._channel.recv_bytes()
        except (EOFError, OSError) as error:
            raise WorkerDiedError(str(error)) from error


def serve() -> None:
    """The body of the process: reward name, socket descriptor and parent's process id are in sys.argv."""
    reward_name, descriptor, parent_pid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    _die_with_parent(parent_pid)
    channel = Connection(descriptor)
    reward_fn = get_reward(reward_name)
    score_safely(reward_fn, "", "0")  # imports the libraries now, outside of the first response's time limit
    try:
        channel.send_bytes(b"ready")
        while True:
            responses, ground_truth = json.loads(channel.recv_bytes())
            for response in responses:
                score = score_safely(reward_fn, response, ground_truth)
                channel.send_bytes(json.dumps(asdict(score)).encode())
    except (EOFError, OSError):
        return  # the pool closed its end


def score_safely(reward_fn: RewardFn, response: str, ground_truth: str) -> Score:
    """Score one response; whatever the reward function raises is an invalid score that says so."""
    try:
        return reward_fn(response, ground_truth)
    except Exception as error:  # noqa: BLE001 - a failed reward is data: counted, never a zero
        return invalid_score(f"the reward failed: {type(error).__name__}: {shorten(error)}")


def invalid_score(detail: str) -> Score:
    """The score of a response about which nothing could be decided."""
    return Score(reward=0.0, answer_correct=False, format_valid=False, verdict="invalid", detail=detail)


def _die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent is killed (Linux)."""
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the call above: no signal will come
        os._exit(1)
