"""Test that a commit waits for open episodes, also while they have no running request."""

import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from coati_rl.errors import EngineError
from tests.unit.engines.scripted_core import ScriptedCore, commit, request, stage, versions, wait_for


@pytest.fixture
def pool():
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield pool


@pytest.fixture
def begin_commit(pool):
    """Begin to commit version 4, which is staged; returns the future once the engine knows of it."""

    def begin(engine, **options) -> Future:
        stage(engine)
        committed = pool.submit(commit, engine, 4, **options)
        wait_for(lambda: engine._commit is not None or committed.done())
        return committed

    return begin


def turn(engine, episode, number, **options):
    return engine.submit(request(f"{episode}-{number}", episode=episode, **options))


def test_a_commit_waits_while_an_episode_waits_for_a_tool_and_its_next_turn_passes(start, begin_commit):
    core = ScriptedCore()
    engine = start(core)
    engine.open_episode("e")
    assert versions(turn(engine, "e", 1)) == [3]
    committed = begin_commit(engine)
    other = engine.submit(request("other"))
    engine.open_episode("late")
    late = turn(engine, "late", 1)
    with pytest.raises(TimeoutError):
        committed.result(0.1)  # the tool runs, and nothing else
    assert (core.num_running(), engine.policy_version) == (0, 3)
    second = turn(engine, "e", 2, min_version=4)  # it would wait for the commit, which waits for it
    assert versions(second) == [3]
    assert not (other.done() or late.done() or committed.done())
    engine.close_episode("e")
    committed.result(timeout=60.0)
    assert (versions(other), versions(late)) == ([4], [4])


def test_the_engine_sleeps_while_a_commit_waits_for_an_idle_episode(start, begin_commit):
    core = ScriptedCore()
    engine = start(core)
    engine.open_episode("e")
    versions(turn(engine, "e", 1))
    committed = begin_commit(engine)
    cpu = time.process_time()
    with pytest.raises(TimeoutError):
        committed.result(0.3)
    assert time.process_time() - cpu < 0.15
    engine.close_episode("e")
    committed.result(10.0)


def test_an_in_flight_commit_does_not_wait_and_each_turn_carries_its_version(start):
    engine = start(ScriptedCore())
    engine.open_episode("e")
    first = turn(engine, "e", 1)
    assert versions(first) == [3]
    stage(engine)
    commit(engine, 4, in_flight=True)
    assert versions(turn(engine, "e", 2)) == [4]


def test_a_commit_whose_episodes_never_close_names_them_at_its_deadline(start):
    core = ScriptedCore()
    engine = start(core)
    for number in range(7):
        engine.open_episode(f"e{number}")
        versions(turn(engine, f"e{number}", 1))
    stage(engine)
    named = r"7 episodes were still open \('e0', 'e1', 'e2', 'e3', 'e4' and 2 more\) at the deadline"
    with pytest.raises(EngineError, match=f"version 4 was not committed: 0 requests were still running and {named}"):
        commit(engine, 4, timeout_s=0.1)
    assert versions(engine.submit(request("next"))) == [3]
    for number in range(7):
        engine.close_episode(f"e{number}")
    commit(engine, 4)
    assert engine.policy_version == 4


def test_an_episode_without_a_turn_does_not_hold_a_commit(start):
    engine = start(ScriptedCore())
    engine.open_episode("e")
    stage(engine)
    commit(engine, 4)
    assert versions(turn(engine, "e", 1)) == [4]


def test_an_episode_that_closes_before_its_first_turn_was_let_in_holds_no_later_commit(start, begin_commit):
    core = ScriptedCore()
    engine = start(core)
    engine.open_episode("running")
    versions(turn(engine, "running", 1))
    committed = begin_commit(engine)
    engine.open_episode("short")
    only = turn(engine, "short", 1)
    engine.close_episode("short")
    engine.close_episode("running")
    committed.result(10.0)
    assert versions(only) == [4]
    stage(engine, version=5)
    commit(engine, 5)
    assert engine.policy_version == 5


def test_an_episode_may_be_opened_again_once_it_is_closed(start, begin_commit):
    engine = start(ScriptedCore())
    engine.open_episode("e")
    with pytest.raises(EngineError, match="an episode with id 'e' is open"):
        engine.open_episode("e")
    versions(turn(engine, "e", 1))
    engine.close_episode("e")
    engine.close_episode("e")
    with pytest.raises(EngineError, match="episode 'e' is not open"):
        turn(engine, "e", 2)
    engine.open_episode("e")
    begin_commit(engine).result(10.0)
    assert versions(turn(engine, "e", 2)) == [4]


def test_an_aborted_turn_leaves_its_episode_open(start, begin_commit):
    core = ScriptedCore()
    core.gate.clear()
    engine = start(core)
    engine.open_episode("e")
    first = turn(engine, "e", 1)
    engine.abort("e-1")
    assert first.result(10.0).completions[0].finish_reason == "abort"
    committed = begin_commit(engine)
    core.gate.set()
    with pytest.raises(TimeoutError):
        committed.result(0.1)
    assert versions(turn(engine, "e", 2)) == [3]
    engine.close_episode("e")
    committed.result(10.0)
