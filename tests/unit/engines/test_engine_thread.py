"""The thread that owns an engine: order, control calls between steps, and what callers see when it dies."""

import threading
import time

import pytest

from coati_rl.errors import EngineError, TransferError, TransferTimeoutError
from producer.engines.admission import RequestRefusedError
from tests.unit.engines.scripted_core import INVITATION, MANIFEST, ScriptedCore, commit, poll, request, wait_for


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
    commit(engine, 4)
    assert core.threads == {"engine"}


def test_poll_waits_for_the_first_result_at_most_as_long_as_asked(start):
    core = ScriptedCore()
    core.gate.clear()
    engine = start(core)
    engine.submit(request("a"))
    begin = time.monotonic()
    assert engine.poll(0.1) == []
    assert 0.1 <= time.monotonic() - begin < 5.0


@pytest.mark.parametrize("method", ["start_staging", "poll_staging"])
def test_a_failed_transfer_is_the_callers_and_the_engine_goes_on(start, method):
    core = ScriptedCore(**{method: TransferError("peer gone")})
    engine = start(core)
    with pytest.raises(TransferError, match="peer gone"):
        engine.stage_weights(MANIFEST, INVITATION, timeout_s=10.0)
    with pytest.raises(EngineError, match="None"):
        commit(engine, 4)
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
        commit(engine, 4)


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
        lambda: commit(engine, 4),
        lambda: engine.probe_logprobs([5], timeout_s=10.0),
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


def test_results_from_before_a_death_are_not_lost(start):
    core = ScriptedCore()
    engine = start(core)
    engine.submit(request("a"))
    wait_for(lambda: engine._results)
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
    for call in (lambda: engine.poll(1.0), lambda: engine.submit(request("a")), lambda: commit(engine, 4)):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_a_waiting_poll_is_woken_by_close(start):
    engine = start(ScriptedCore())
    threading.Timer(0.1, engine.close).start()
    with pytest.raises(EngineError, match="closed"):
        engine.poll(30.0)
