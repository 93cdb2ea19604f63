"""Make the reward in the fork server, and score responses in the workers, which are forks of it.

A worker sends {"ready": its process id}, or {"error": cause} and ends. Then it reads lines [problem, responses] and
writes a line per response, in order, each as soon as it is known. Therefore the pool always knows which response is
being scored, and one that hangs affects no other.

A worker whose reward only computes has limited memory. A response that needs more is invalid: an allocation fails, or
the peak is found afterwards (sympy continues after a failed allocation, and might call the response wrong). Then the
worker ends, because its memory may not be released.
"""

import json
import os
import resource
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice

from coati_rl.processes import fork_server
from coati_rl.processes.fork_server import as_line, described
from coati_rl.reward_spec import RewardSpec
from coati_rl.types import Problem, Score
from rewards.registry import make_reward
from rewards.reward import Reward, invalid_score, only_computes, warm_up

BODY = "from rewards.workers.worker_process import main; main()"
SPEC_VARIABLE = "COATI_REWARD_SPEC"
MIB = 1 << 20
MAX_PEAK_BYTES = 128 * MIB  # resident memory that a worker may add; ordinary answers add 12 MiB in total
_MAX_ADDRESS_SPACE_BYTES = 512 * MIB  # address space that a worker may add


def main() -> None:
    """Run the fork server, with a RewardSpec in the environment."""
    spec = RewardSpec(**json.loads(os.environ[SPEC_VARIABLE]))
    fork_server.serve(BODY, lambda: _make_warm(spec), _serve)


def _serve(make: Callable[[], Reward], sock: socket.socket) -> None:
    """Score requests until the pool closes its end."""
    try:
        reward = make()
    except Exception as error:
        sock.sendall(as_line({"error": described(error)}))
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
