"""The body of a scoring process: responses with their problem flow in, scores flow out, one JSON text a line.

Wire: the worker says {"ready": its process id}, or {"error": why there is no reward} and ends. Then each line in is
[problem, responses], answered with a line per response, in order, each as soon as it is known. So the pool knows which
response is being scored at any time, and one that hangs costs itself only.

A worker is forked from the nursery, which has made the reward and imported its libraries already.
"""

import ctypes
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice

from coati_rl.errors import ConfigError
from coati_rl.types import Problem, Score
from rewards.reward import Reward, invalid_score
from rewards.text import shorten

_PR_SET_PDEATHSIG = 1


def serve(make: Callable[[], Reward], sock: socket.socket) -> None:
    """Score what arrives until the pool closes its end."""
    try:
        reward = make()
    except Exception as error:
        sock.sendall(as_line({"error": describe(error)}))
        raise
    try:
        sock.sendall(as_line({"ready": os.getpid()}))
        with sock.makefile("rb") as lines:
            for line in lines:
                problem, responses = json.loads(line)
                for score in _scores(reward, responses, Problem(**problem)):
                    sock.sendall(as_line(asdict(score)))
    except OSError:
        return  # the pool closed its end


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent is killed (Linux)."""
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the call above: no signal will come
        os._exit(1)


def as_line(message: object) -> bytes:
    """A message as it travels."""
    return json.dumps(message).encode() + b"\n"


def describe(error: Exception) -> str:
    """Why a reward could not be made, on one line; a ConfigError's message is complete by itself."""
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {shorten(error, 300)}"


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
