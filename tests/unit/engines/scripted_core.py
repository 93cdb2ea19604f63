"""Sample one token per step for the first request, as a core for tests of the engine's thread.

In: which methods raise, and what; a gate that holds its steps. Out: results whose tokens name the version that served.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from coati_rl.probe import ProbeAnswer
from coati_rl.transport.manifest import TensorEntry, WeightManifest
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.types import Completion, GenerationRequest, GenerationResult, SamplingParams
from producer.engines.engine_thread import ThreadedEngine

MANIFEST = WeightManifest(policy_version=4, entries=(TensorEntry(name="a", dtype="float32", shape=(1,)),))
INVITATION = Rendezvous(backend="gloo", secret="5e" * 16, host="127.0.0.1", port=1, world_size=2, first_rank=1)


class ScriptedCore:
    """Once `gate` is open, each step gives every sample of the first request a token, up to its max_new_tokens.

    `failures` names the methods that raise, and what.
    """

    vocab_size = 100
    max_model_len = 10
    identities = ("identity",)

    def __init__(self, **failures: BaseException) -> None:
        self.failures = failures
        self.gate = threading.Event()
        self.gate.set()
        self.policy_version = 0
        self.queue: list[GenerationRequest] = []
        self.versions: dict[str, list[int]] = {}  # by request: of its tokens so far
        self.streams = {}
        self.probes: list[Callable[[ProbeAnswer], None]] = []
        self.polls_until_staged = 3
        self.num_steps = 0
        self.closed = threading.Event()
        self.threads: set[str] = set()

    def _called(self, method: str) -> None:
        self.threads.add(threading.current_thread().name)
        if method in self.failures:
            raise self.failures[method]

    def load(self):
        self._called("load")

    def add(self, request, stream):
        self._called("add")
        self.queue.append(request)
        self.versions[request.request_id] = []
        self.streams[request.request_id] = stream

    def abort(self, request_id):
        self._called("abort")
        place = [place for place, request in enumerate(self.queue) if request.request_id == request_id]
        return self.result(place[0], "abort") if place else None

    def num_running(self):
        return len(self.queue) + len(self.probes)

    def step(self):
        self._called("step")
        self.num_steps += 1
        if not self.gate.wait(timeout=0.01):
            return []
        while self.probes:
            self.probes.pop()(ProbeAnswer(logprobs=np.full(1, self.policy_version, dtype=np.float32)))
        return self.sample()

    def sample(self):
        """A token for the first request; its result if that was the last one."""
        if not self.queue:
            return []
        request = self.queue[0]
        self.versions[request.request_id].append(self.policy_version)
        if stream := self.streams[request.request_id]:
            for index in range(request.num_samples):
                stream.send(index, [1], [-1.0], self.policy_version)
        is_last = len(self.versions[request.request_id]) == request.sampling.max_new_tokens
        return [self.result(0, "length")] if is_last else []

    def result(self, place, finish_reason):
        request = self.queue.pop(place)
        versions = np.array(self.versions.pop(request.request_id), dtype=np.int32)
        completion = Completion(
            token_ids=np.ones(len(versions), dtype=np.int32),
            logprobs=np.full(len(versions), -1.0, dtype=np.float32),
            policy_versions=versions,
            finish_reason=finish_reason,
            text="",
        )
        return GenerationResult(request_id=request.request_id, completions=(completion,) * request.num_samples)

    def probe(self, token_ids, answer):
        self._called("probe")
        self.probes.append(answer)

    def start_staging(self, manifest, rendezvous, *, timeout_s):
        self._called("start_staging")

    def poll_staging(self):
        self._called("poll_staging")
        self.polls_until_staged -= 1
        return None if self.polls_until_staged > 0 else ("digest",)

    def commit(self, policy_version):
        self._called("commit")
        results = self.sample()  # of a step in flight
        self.policy_version = policy_version
        return results

    def close(self):
        self.closed.set()


def request(
    request_id: str,
    token_ids: Sequence[int] = (1,),
    *,
    num_tokens: int = 1,
    num_samples: int = 1,
    episode: str | None = None,
    min_version: int = -1,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        token_ids=tuple(token_ids),
        num_samples=num_samples,
        sampling=SamplingParams(max_new_tokens=num_tokens),
        episode_id=episode,
        min_policy_version=min_version,
    )


def commit(engine: ThreadedEngine, version: int, *, in_flight: bool = False, timeout_s: float = 10.0) -> None:
    engine.commit_weights(version, in_flight=in_flight, timeout_s=timeout_s)


def stage(engine: ThreadedEngine, version: int = 4) -> None:
    manifest = WeightManifest(policy_version=version, entries=MANIFEST.entries)
    engine.stage_weights(manifest, INVITATION, timeout_s=10.0)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def versions(future: "Future[GenerationResult]") -> list[int]:
    """Of the tokens of a request's first sample, once it is answered."""
    return future.result(10.0).completions[0].policy_versions.tolist()
