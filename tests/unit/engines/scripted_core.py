"""A core that finishes one request per step, for tests of the thread that owns an engine.

In: which methods raise, and what; a gate that holds its steps. Out: results whose error names the version that served.
"""

import threading
import time
from collections.abc import Callable

import numpy as np

from coati_rl.transport.manifest import TensorEntry, WeightManifest
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.types import GenerationRequest, GenerationResult, SamplingParams
from producer.engines.engine_thread import ThreadedEngine

MANIFEST = WeightManifest(policy_version=4, entries=(TensorEntry(name="a", dtype="float32", shape=(1,)),))
INVITATION = Rendezvous(backend="gloo", secret="5e" * 16, host="127.0.0.1", port=1, world_size=2, first_rank=1)


class ScriptedCore:
    """Finishes one request per step, once `gate` is open; `failures` names the methods that raise, and what."""

    vocab_size = 100
    max_model_len = 10

    def __init__(self, **failures: BaseException) -> None:
        self.failures = failures
        self.gate = threading.Event()
        self.gate.set()
        self.policy_version = 0
        self.queue: list[GenerationRequest] = []
        self.probes: list[Callable[[np.ndarray], None]] = []
        self.polls_until_staged = 3
        self.closed = threading.Event()
        self.threads: set[str] = set()

    def _called(self, method: str) -> None:
        self.threads.add(threading.current_thread().name)
        if method in self.failures:
            raise self.failures[method]

    def load(self):
        self._called("load")

    def add(self, request):
        self._called("add")
        self.queue.append(request)

    def num_running(self):
        return len(self.queue) + len(self.probes)

    def step(self):
        self._called("step")
        if not self.gate.wait(timeout=0.01):
            return []
        while self.probes:
            self.probes.pop()(np.full(1, self.policy_version, dtype=np.float32))
        return [self.finish() for _ in self.queue[:1]]

    def finish(self):
        return GenerationResult(request_id=self.queue.pop(0).request_id, error=f"version {self.policy_version}")

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
        results = [self.finish() for _ in self.queue[:1]]  # of a step in flight
        self.policy_version = policy_version
        return results

    def close(self):
        self.closed.set()


def request(request_id: str, *token_ids: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id, token_ids=token_ids or (1,), num_samples=1, sampling=SamplingParams()
    )


def commit(engine: ThreadedEngine, version: int, *, in_flight: bool = False, timeout_s: float = 10.0) -> None:
    engine.commit_weights(version, in_flight=in_flight, timeout_s=timeout_s)


def stage(engine: ThreadedEngine, version: int = 4) -> None:
    manifest = WeightManifest(policy_version=version, entries=MANIFEST.entries)
    engine.stage_weights(manifest, INVITATION, timeout_s=10.0)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def poll(engine: ThreadedEngine, number: int) -> list[GenerationResult]:
    results: list[GenerationResult] = []
    while len(results) < number:
        results += engine.poll(10.0)
    return results
