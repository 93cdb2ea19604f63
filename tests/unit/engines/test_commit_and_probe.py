"""Test when staged weights are swapped in, what happens to running requests, and how probes are served."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from coati_rl.errors import EngineError, TransferError
from producer.engines.engine_thread import ThreadedEngine
from tests.unit.engines.scripted_core import ScriptedCore, commit, request, stage, versions, wait_for


def test_a_commit_waits_for_what_runs_and_what_comes_later_waits_for_the_commit(start):
    core = ScriptedCore()
    core.gate.clear()
    engine = start(core)
    old = engine.submit(request("old"))
    stage(engine)
    with ThreadPoolExecutor(max_workers=1) as pool:
        committed = pool.submit(commit, engine, 4)
        wait_for(lambda: engine._commit is not None)
        new = engine.submit(request("new"))
        with pytest.raises(TimeoutError):
            new.result(0.1)
        assert (engine.policy_version, [one.request_id for one in core.queue]) == (3, ["old"])
        core.gate.set()
        committed.result(timeout=60.0)
    assert engine.policy_version == 4
    assert (versions(old), versions(new)) == ([3], [4])


def test_a_request_for_newer_weights_waits_for_their_commit_and_keeps_nobody_up(start):
    engine = start(ScriptedCore())
    ahead = engine.submit(request("ahead", min_version=5))
    assert versions(engine.submit(request("now", min_version=3))) == [3]
    for version in (4, 5):
        with pytest.raises(TimeoutError):
            ahead.result(0.05)
        stage(engine, version=version)
        commit(engine, version)
    assert versions(ahead) == [5]


def test_an_in_flight_commit_meets_running_requests_which_go_on(start):
    core = ScriptedCore()
    core.gate.clear()
    engine = start(core)
    futures = [engine.submit(request(name, num_tokens=2)) for name in "ab"]
    stage(engine)
    commit(engine, 4, in_flight=True)
    assert engine.policy_version == 4
    core.gate.set()  # the first token of "a" came from a step that had begun before
    assert [versions(future) for future in futures] == [[3, 4], [4, 4]]


def test_a_commit_past_its_deadline_is_withdrawn_and_what_waited_for_it_is_served(start):
    core = ScriptedCore()
    core.gate.clear()
    engine = start(core)
    futures = [engine.submit(request(name)) for name in "abc"]
    stage(engine)
    with pytest.raises(EngineError, match="version 4 was not committed: 3 requests were still running at the deadline"):
        commit(engine, 4, timeout_s=0.1)
    futures.append(engine.submit(request("later")))
    core.gate.set()
    assert [versions(future) for future in futures] == [[3]] * 4
    assert engine.policy_version == 3
    commit(engine, 4)  # it is still staged
    assert engine.policy_version == 4


def test_a_commit_whose_caller_gave_up_never_happens(start, monkeypatch):
    monkeypatch.setattr("producer.engines.engine_thread._GRACE_S", 0.1)
    core = ScriptedCore()
    engine = start(core)
    stage(engine)
    entered, leave, step = threading.Event(), threading.Event(), core.step
    core.step = lambda: entered.set() or (leave.wait() and [])
    future = engine.submit(request("a"))
    assert entered.wait(10.0)
    with pytest.raises(EngineError, match=r"committing version 4: .* one step takes too long"):
        commit(engine, 4, in_flight=True, timeout_s=0.1)
    core.step = step
    leave.set()
    assert versions(future) == [3]
    assert engine.policy_version == 3


def test_one_commit_waits_at_a_time(start):
    core = ScriptedCore()
    core.gate.clear()
    engine = start(core)
    engine.submit(request("a"))
    stage(engine)
    with ThreadPoolExecutor(max_workers=1) as pool:
        first = pool.submit(commit, engine, 4)
        wait_for(lambda: engine._commit is not None)
        with pytest.raises(EngineError, match="the commit of version 4 is still pending"):
            commit(engine, 4)
        core.gate.set()
        first.result(timeout=60.0)


def test_an_update_staged_while_a_commit_waits_takes_its_place_and_the_commit_fails(start):
    core = ScriptedCore()
    core.gate.clear()
    engine = start(core)
    engine.submit(request("a"))
    stage(engine)
    with ThreadPoolExecutor(max_workers=1) as pool:
        first = pool.submit(commit, engine, 4)
        wait_for(lambda: engine._commit is not None)
        stage(engine, version=5)
        core.gate.set()
        with pytest.raises(EngineError, match="cannot commit version 4: the staged version is 5"):
            first.result(timeout=60.0)
    commit(engine, 5)
    assert engine.policy_version == 5


@pytest.mark.parametrize("version", [-1, 0])
def test_the_start_version_may_be_committed_and_may_be_minus_one(version):
    engine = ThreadedEngine(ScriptedCore(), policy_version=version)
    assert engine.policy_version == version
    for committed in (0, 0, 1):
        stage(engine, version=committed)
        commit(engine, committed)
        assert engine.policy_version == committed
    engine.close()


def test_a_probe_is_answered_beside_running_requests(start):
    core = ScriptedCore()
    engine = start(core)
    assert engine.probe([5, 6], timeout_s=10.0).logprobs.tolist() == [3.0]
    future = engine.submit(request("a"))
    assert engine.probe([5, 6], timeout_s=10.0).logprobs.tolist() == [3.0]
    assert versions(future) == [3]


def test_a_probe_that_is_answered_too_late_is_an_error_of_its_own_and_the_engine_goes_on(start):
    core = ScriptedCore()
    core.gate.clear()
    engine = start(core)
    with pytest.raises(EngineError, match="probing: the engine thread did not answer in time"):
        engine.probe([5, 6], timeout_s=0.1)
    core.gate.set()
    assert len(engine.probe([5, 6], timeout_s=10.0).logprobs) == 1


@pytest.mark.parametrize(("token_ids", "reason"), [([], "empty"), ([5, 100], "token id 100"), ([1] * 10, "10 tokens")])
def test_a_probe_that_no_core_could_take_is_refused(start, token_ids, reason):
    engine = start(ScriptedCore())
    with pytest.raises(EngineError, match=f"a probe was refused: .*{reason}"):
        engine.probe(token_ids, timeout_s=10.0)


def test_versions_never_go_back(start):
    engine = start(ScriptedCore())
    with pytest.raises(TransferError, match="version 2 is older than version 3"):
        stage(engine, version=2)
    stage(engine, version=3)
    commit(engine, 3)


@pytest.mark.parametrize("in_flight", [True, False])
def test_a_commit_that_fails_half_way_ends_the_engine(start, in_flight):
    core = ScriptedCore(commit=RuntimeError("half loaded"))
    engine = start(core)
    stage(engine)
    with pytest.raises(EngineError, match="the engine died: RuntimeError: half loaded"):
        commit(engine, 4, in_flight=in_flight)
    with pytest.raises(EngineError, match="half loaded"):
        engine.submit(request("a"))
    assert engine.policy_version == 3


def test_a_commit_that_fails_before_it_loads_leaves_the_old_weights_serving(start):
    core = ScriptedCore(commit=EngineError("not now"))
    engine = start(core)
    stage(engine)
    with pytest.raises(EngineError, match="not now"):
        commit(engine, 4)
    assert versions(engine.submit(request("a"))) == [3]
