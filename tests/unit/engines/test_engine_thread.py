"""The thread that owns an engine: order, control calls between steps, and what callers see when it dies."""

import threading
import time

import pytest

from coati_rl.errors import EngineError, TransferError, TransferTimeoutError
from coati_rl.transport.manifest import TensorEntry, WeightManifest
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.types import GenerationRequest, GenerationResult, SamplingParams
from producer.engines.admission import RequestRefusedError
from producer.engines.engine_thread import ThreadedEngine

MANIFEST = WeightManifest(policy_version=4, entries=(TensorEntry(name="a", dtype="float32", shape=(1,)),))
INVITATION = Rendezvous(backend="gloo", epoch=1, host="127.0.0.1", port=1, world_size=2, first_rank=1)


class ScriptedCore:
    """Finishes one request per step, once `gate` is open; `failures` names the methods that raise, and what."""

    vocab_size = 100
    max_model_len = 10

    def __init__(self, **failures: BaseException) -> None:
        self.failures = failures
        self.gate = threading.Event()
        self.gate.set()
        self.queue: list[tuple[GenerationRequest, int]] = []
        self.polls_until_staged = 3
        self.closed = threading.Event()
        self.threads: set[str] = set()

    def _called(self, method: str) -> None:
        self.threads.add(threading.current_thread().name)
        if method in self.failures:
            raise self.failures[method]

    def load(self):
        self._called("load")

    def add(self, request, *, policy_version):
        self._called("add")
        self.queue.append((request, policy_version))

    def has_work(self):
        return bool(self.queue)

    def step(self):
        self._called("step")
        if not self.gate.wait(timeout=0.01):
            return []
        request, version = self.queue.pop(0)
        return [GenerationResult(request_id=f"{request.request_id}", error=f"version {version}")]

    def start_staging(self, manifest, rendezvous, *, timeout_s):
        self._called("start_staging")

    def poll_staging(self):
        self._called("poll_staging")
        self.polls_until_staged -= 1
        return None if self.polls_until_staged > 0 else ("digest",)

    def commit(self):
        self._called("commit")

    def close(self):
        self.closed.set()


def request(request_id: str, *token_ids: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id, token_ids=token_ids or (1,), num_samples=1, sampling=SamplingParams()
    )


@pytest.fixture
def start():
    engines = []

    def make(core: ScriptedCore) -> ThreadedEngine:
        engines.append(ThreadedEngine(core, policy_version=3))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def poll(engine: ThreadedEngine, number: int) -> list[GenerationResult]:
    results: list[GenerationResult] = []
    while len(results) < number:
        results += engine.poll(10.0)
    return results


def test_requests_come_back_once_each_and_are_counted_until_then(start):
    core = ScriptedCore()
    core.gate.clear()
    engine = start(core)
    for name in "abc":
        engine.submit(request(name))
    assert engine.num_unfinished() == 3
    assert engine.poll(0.0) == []
    core.gate.set()
    assert [result.request_id for result in poll(engine, 3)] == ["a", "b", "c"]
    assert engine.num_unfinished() == 0
    assert engine.poll(0.0) == []


def test_everything_runs_on_the_engine_thread(start):
    core = ScriptedCore()
    engine = start(core)
    engine.submit(request("a"))
    engine.stage_weights(MANIFEST, INVITATION, timeout_s=10.0)
    poll(engine, 1)
    engine.commit_weights(4)
    assert core.threads == {"engine"}


def test_poll_waits_for_the_first_result_at_most_as_long_as_asked(start):
    core = ScriptedCore()
    core.gate.clear()
    engine = start(core)
    engine.submit(request("a"))
    begin = time.monotonic()
    assert engine.poll(0.1) == []
    assert 0.1 <= time.monotonic() - begin < 5.0


def test_a_transfer_is_watched_while_requests_run_and_commits_when_they_are_done(start):
    core = ScriptedCore()
    core.gate.clear()
    engine = start(core)
    engine.submit(request("old"))
    assert engine.stage_weights(MANIFEST, INVITATION, timeout_s=10.0) == ("digest",)
    with pytest.raises(EngineError, match="running"):
        engine.commit_weights(4)
    assert engine.policy_version == 3
    core.gate.set()
    (old,) = poll(engine, 1)
    engine.commit_weights(4)
    engine.submit(request("new"))
    (new,) = poll(engine, 1)
    assert (old.error, new.error, engine.policy_version) == ("version 3", "version 4", 4)


@pytest.mark.parametrize("method", ["start_staging", "poll_staging"])
def test_a_failed_transfer_is_the_callers_and_the_engine_goes_on(start, method):
    core = ScriptedCore(**{method: TransferError("peer gone")})
    engine = start(core)
    with pytest.raises(TransferError, match="peer gone"):
        engine.stage_weights(MANIFEST, INVITATION, timeout_s=10.0)
    with pytest.raises(EngineError, match="None"):
        engine.commit_weights(4)
    engine.submit(request("a"))
    assert len(poll(engine, 1)) == 1


def test_a_failed_transfer_forgets_what_was_staged_before(start):
    core = ScriptedCore()
    engine = start(core)
    engine.stage_weights(MANIFEST, INVITATION, timeout_s=10.0)
    core.failures["poll_staging"] = TransferError("peer gone")
    with pytest.raises(TransferError):
        engine.stage_weights(MANIFEST, INVITATION, timeout_s=10.0)
    with pytest.raises(EngineError, match="None"):
        engine.commit_weights(4)


def test_versions_never_go_back(start):
    engine = start(ScriptedCore())
    older = WeightManifest(policy_version=2, entries=MANIFEST.entries)
    same = WeightManifest(policy_version=3, entries=MANIFEST.entries)
    with pytest.raises(TransferError, match="version 2 is older than 3"):
        engine.stage_weights(older, INVITATION, timeout_s=10.0)
    engine.stage_weights(same, INVITATION, timeout_s=10.0)
    engine.commit_weights(3)


def test_a_core_that_refuses_a_request_answers_with_an_error(start):
    engine = start(ScriptedCore(add=RequestRefusedError("not today")))
    engine.submit(request("a"))
    assert [result.error for result in poll(engine, 1)] == ["not today"]
    assert engine.num_unfinished() == 0


@pytest.mark.parametrize("method", ["load", "add", "step"])
def test_a_death_reaches_everyone_with_its_cause(start, method):
    core = ScriptedCore(**{method: ZeroDivisionError("boom")})
    engine = start(core)
    if method != "load":
        engine.submit(request("a"))
    for call in (
        lambda: engine.poll(10.0),
        lambda: engine.stage_weights(MANIFEST, INVITATION, timeout_s=10.0),
        lambda: engine.commit_weights(4),
        lambda: engine.submit(request("b")),
    ):
        with pytest.raises(EngineError, match="the engine died: ZeroDivisionError: boom") as caught:
            call()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert core.closed.wait(10.0)


def test_a_load_that_fails_is_seen_by_who_waits_for_it(start):
    engine = start(ScriptedCore(load=EngineError("no such model")))
    with pytest.raises(EngineError, match="no such model"):
        engine.wait_ready(10.0)


def test_a_commit_that_fails_half_way_ends_the_engine(start):
    core = ScriptedCore(commit=RuntimeError("half loaded"))
    engine = start(core)
    engine.stage_weights(MANIFEST, INVITATION, timeout_s=10.0)
    with pytest.raises(EngineError, match="half loaded"):
        engine.commit_weights(4)
    with pytest.raises(EngineError, match="half loaded"):
        engine.submit(request("a"))
    assert engine.policy_version == 3


def test_results_from_before_a_death_are_not_lost(start):
    core = ScriptedCore()
    engine = start(core)
    engine.submit(request("a"))
    deadline = time.monotonic() + 10.0
    while not engine._results and time.monotonic() < deadline:
        time.sleep(0.001)
    core.failures["step"] = ZeroDivisionError("boom")
    engine.submit(request("b"))
    assert [result.request_id for result in poll(engine, 1)] == ["a"]
    with pytest.raises(EngineError, match="boom"):
        engine.poll(10.0)


def test_a_step_that_takes_too_long_does_not_hold_a_transfer_for_ever(start, monkeypatch):
    monkeypatch.setattr("producer.engines.engine_thread._GRACE_S", 0.1)
    core = ScriptedCore()
    engine = start(core)
    engine.wait_ready(10.0)
    slow = threading.Event()
    core.step = lambda: slow.wait() and []
    engine.submit(request("a"))
    with pytest.raises(TransferTimeoutError, match="one step takes too long"):
        engine.stage_weights(MANIFEST, INVITATION, timeout_s=0.1)
    core.queue.clear()
    slow.set()


def test_after_close_every_call_says_so(start):
    core = ScriptedCore()
    engine = start(core)
    engine.close()
    engine.close()
    assert core.closed.is_set()
    for call in (lambda: engine.poll(1.0), lambda: engine.submit(request("a")), lambda: engine.commit_weights(4)):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_a_waiting_poll_is_woken_by_close(start):
    engine = start(ScriptedCore())
    threading.Timer(0.1, engine.close).start()
    with pytest.raises(EngineError, match="closed"):
        engine.poll(30.0)
