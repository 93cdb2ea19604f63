"""Test the thread that owns an engine: futures, calls between steps, and the error after it has ended."""

import asyncio
import threading

import pytest

from coati_rl.errors import EngineError, TransferError, TransferTimeoutError
from producer.engines.admission import RequestRefusedError
from tests.unit.engines.scripted_core import INVITATION, MANIFEST, ScriptedCore, commit, request, versions, wait_for


def test_each_request_has_a_future_of_its_own_result(start):
    core = ScriptedCore()
    core.gate.clear()
    engine = start(core)
    futures = {name: engine.submit(request(name)) for name in "abc"}
    assert not any(future.done() for future in futures.values())
    core.gate.set()
    assert {name: future.result(10.0).request_id for name, future in futures.items()} == {"a": "a", "b": "b", "c": "c"}


def test_what_is_in_flight_is_counted_in_samples_until_the_future_is_resolved(start):
    core = ScriptedCore()
    core.gate.clear()
    engine = start(core)
    futures = [engine.submit(request(name, num_samples=number)) for name, number in (("a", 3), ("b", 4))]
    assert engine.num_sequences() == 7
    core.gate.set()
    assert [future.result(10.0).error for future in futures] == [None, None]
    assert engine.num_sequences() == 0


def test_a_result_that_comes_twice_is_given_once(start):
    core = ScriptedCore()
    engine = start(core)
    step = core.step
    core.step = lambda: 2 * step()
    seen = []
    engine.submit(request("a")).add_done_callback(lambda future: seen.append(future.result().request_id))
    engine.submit(request("b")).result(10.0)
    assert seen == ["a"]


def test_a_future_cannot_be_cancelled_by_whom_it_was_given_to(start):
    core = ScriptedCore()
    core.gate.clear()
    engine = start(core)
    future = engine.submit(request("a"))
    assert not future.cancel()
    core.gate.set()
    assert future.result(10.0).error is None


def test_a_task_of_an_event_loop_may_await_a_request_and_be_cancelled(start):
    core = ScriptedCore()
    core.gate.clear()
    engine = start(core)

    async def play():
        given_up = asyncio.ensure_future(asyncio.wrap_future(engine.submit(request("given up"))))
        await asyncio.sleep(0.01)
        given_up.cancel()
        core.gate.set()
        return await asyncio.wrap_future(engine.submit(request("awaited")))

    assert asyncio.run(play()).request_id == "awaited"
    engine.check_alive()


def test_a_callback_may_submit_the_next_request(start):
    engine = start(ScriptedCore())
    answered = threading.Event()
    first = engine.submit(request("first"))
    first.add_done_callback(lambda _: engine.submit(request("second")).add_done_callback(lambda _: answered.set()))
    assert answered.wait(10.0)


def test_two_unfinished_requests_need_different_ids(start):
    core = ScriptedCore()
    core.gate.clear()
    engine = start(core)
    first = engine.submit(request("twin"))
    with pytest.raises(EngineError, match="a request with id 'twin' is running"):
        engine.submit(request("twin"))
    core.gate.set()
    first.result(10.0)
    assert engine.submit(request("twin")).result(10.0).error is None


def test_everything_runs_on_the_engine_thread(start):
    core = ScriptedCore()
    engine = start(core)
    future = engine.submit(request("a"))
    engine.abort("a")
    engine.stage_weights(MANIFEST, INVITATION, timeout_s=10.0)
    future.result(10.0)
    commit(engine, 4)
    assert core.threads == {"engine"}


@pytest.mark.parametrize("method", ["start_staging", "poll_staging"])
def test_a_failed_transfer_is_the_callers_and_the_engine_goes_on(start, method):
    core = ScriptedCore(**{method: TransferError("peer gone")})
    engine = start(core)
    with pytest.raises(TransferError, match="peer gone"):
        engine.stage_weights(MANIFEST, INVITATION, timeout_s=10.0)
    with pytest.raises(EngineError, match="None"):
        commit(engine, 4)
    assert versions(engine.submit(request("a"))) == [3]


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
    assert engine.submit(request("a")).result(10.0).error == "not today"
    assert engine.num_sequences() == 0


@pytest.mark.parametrize("method", ["load", "add", "step"])
def test_a_death_reaches_everyone_with_its_cause(start, method):
    core = ScriptedCore(**{method: ZeroDivisionError("boom")})
    core.gate.clear()
    engine = start(core)
    futures = [] if method == "load" else [engine.submit(request(name)) for name in "ab"]
    for call in (
        *(lambda future=future: future.result(10.0) for future in futures),
        lambda: engine.stage_weights(MANIFEST, INVITATION, timeout_s=10.0),
        lambda: commit(engine, 4),
        lambda: engine.probe([5], timeout_s=10.0),
        lambda: engine.submit(request("c")),
        lambda: engine.open_episode("e"),
        engine.check_alive,
    ):
        with pytest.raises(EngineError, match="the engine died: ZeroDivisionError: boom") as caught:
            call()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert core.closed.wait(10.0)
    assert engine.num_sequences() == 0
    engine.abort("a")
    engine.close_episode("e")


def test_a_load_that_fails_is_seen_by_who_waits_for_it(start):
    engine = start(ScriptedCore(load=EngineError("no such model")))
    with pytest.raises(EngineError, match="no such model"):
        engine.wait_ready(10.0)


def test_results_from_before_a_death_are_not_lost(start):
    core = ScriptedCore()
    engine = start(core)
    first = engine.submit(request("a"))
    first.result(10.0)
    core.failures["step"] = ZeroDivisionError("boom")
    with pytest.raises(EngineError, match="boom"):
        engine.submit(request("b")).result(10.0)
    assert first.result(0.0).request_id == "a"


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


def test_after_close_every_call_says_so_and_every_future_is_resolved(start):
    core = ScriptedCore()
    core.gate.clear()
    engine = start(core)
    future = engine.submit(request("a"))
    engine.close()
    engine.close()
    assert core.closed.is_set()
    for call in (lambda: future.result(10.0), lambda: engine.submit(request("b")), lambda: commit(engine, 4)):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_a_step_that_never_ends_does_not_keep_futures_open_when_the_engine_is_closed(start, monkeypatch):
    monkeypatch.setattr("producer.engines.engine_thread._CLOSE_TIMEOUT_S", 0.1)
    core = ScriptedCore()
    engine = start(core)
    entered, leave, step = threading.Event(), threading.Event(), core.step
    core.step = lambda: entered.set() or (leave.wait(), step())[1]
    future = engine.submit(request("a"))
    assert entered.wait(10.0)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        future.result(0.0)
    leave.set()
    assert core.closed.wait(10.0)  # its result came too late, which did the thread no harm


# ---- abort ----


def test_an_aborted_request_gives_the_tokens_sampled_so_far(start):
    core = ScriptedCore()
    engine = start(core)
    reached, sampled = threading.Event(), []

    def note(chunk):
        sampled.append(chunk)
        if len(sampled) == 3:
            core.gate.clear()
            reached.set()

    future = engine.submit(request("a", num_tokens=9), note)
    assert reached.wait(10.0)
    engine.abort("a")
    result = future.result(10.0)
    assert (result.error, result.completions[0].finish_reason) == (None, "abort")
    assert versions(future) == [3, 3, 3]
    assert engine.num_sequences() == 0


def test_to_abort_what_is_unknown_or_finished_or_aborted_is_harmless(start):
    core = ScriptedCore()
    engine = start(core)
    engine.abort("nobody")
    done = engine.submit(request("done"))
    assert versions(done) == [3]
    engine.abort("done")
    core.gate.clear()
    future = engine.submit(request("a"))
    for _ in range(3):
        engine.abort("a")
    assert future.result(10.0).completions[0].finish_reason == "abort"
    core.gate.set()
    assert versions(engine.submit(request("a"))) == [3]
    assert done.result(0.0).completions[0].finish_reason == "length"


def test_a_request_that_waits_for_newer_weights_can_be_aborted(start):
    engine = start(ScriptedCore())
    future = engine.submit(request("ahead", min_version=5, num_samples=2))
    engine.abort("ahead")
    result = future.result(10.0)
    assert [(one.finish_reason, len(one.token_ids)) for one in result.completions] == [("abort", 0), ("abort", 0)]
    assert engine.num_sequences() == 0


# ---- streams ----


def test_the_chunks_of_a_sample_make_up_its_completion_and_come_before_the_result(start):
    engine = start(ScriptedCore())
    chunks = []
    future = engine.submit(request("a", num_tokens=4, num_samples=2), chunks.append)
    future.result(10.0)
    assert [(chunk.request_id, chunk.index) for chunk in chunks] == [("a", 0), ("a", 1)] * 4
    for index, completion in enumerate(future.result().completions):
        for field in ("token_ids", "logprobs", "policy_versions"):
            streamed = [value for chunk in chunks if chunk.index == index for value in getattr(chunk, field).tolist()]
            assert streamed == getattr(completion, field).tolist()
            assert all(getattr(chunk, field).dtype == getattr(completion, field).dtype for chunk in chunks)


def test_a_listener_that_fails_is_logged_and_called_no_more_and_the_request_goes_on(start, caplog):
    engine = start(ScriptedCore())
    calls = []

    def fail(chunk):
        calls.append(chunk)
        raise ZeroDivisionError("boom")

    assert versions(engine.submit(request("a", num_tokens=4), fail)) == [3, 3, 3, 3]
    assert len(calls) == 1
    assert "request a: its token listener raised an error" in caplog.text
    engine.check_alive()


def test_an_idle_engine_takes_no_step(start):
    core = ScriptedCore()
    engine = start(core)
    versions(engine.submit(request("a", num_tokens=2)))
    wait_for(lambda: core.num_steps == 2)
    with pytest.raises(TimeoutError):
        engine.submit(request("ahead", min_version=9)).result(0.1)
    assert core.num_steps == 2
