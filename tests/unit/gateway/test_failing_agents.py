"""Test agents that fail, are cut, or whose engine fails: their samples are invalid, and the others go on."""

import time

import pytest

from coati_rl.errors import EngineError
from producer.engines.admission import RequestRefusedError
from tests.unit.gateway.agent_producer import TWO_TURNS, Producer, wait_for


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        ("ask(task['messages']); raise ValueError('no luck')", "agent: exit code 1: ValueError: no luck"),
        pytest.param("pass", "agent: it ended without a call that was answered", marks=pytest.mark.full),
        ("ask(task['messages']); time.sleep(600)", "agent: not done within 3 s"),
        (
            "ask(task['messages'])",
            "agent: it reported no reward, and no other counts (-rt env)",
        ),
        pytest.param(
            "ask(task['messages'], temperature=0)",
            "agent: exit code 1: urllib.error.HTTPError: HTTP Error 400: Bad Request",
            marks=pytest.mark.full,
        ),
    ],
)
def test_an_agent_that_fails_makes_its_own_sample_invalid_and_no_other(make, code, detail) -> None:
    bad = f"\nif task['episode'] == 0:\n    {code}\n    sys.exit(0)\n" + TWO_TURNS
    (rolled_out,) = make(bad, timeout_s=3.0).run()
    first, second = rolled_out.scores[0], rolled_out.scores[1]
    assert (first.verdict, first.detail) == ("invalid", detail)
    assert (second.verdict, second.reward) == ("ok", 2.0)
    assert [each.episode for each in rolled_out.trajectories] == [0, 1]


def test_an_agent_that_reports_a_failure_of_the_engine_as_a_zero_is_invalid(make) -> None:
    code = """
try:
    ask(task["messages"])
except urllib.error.HTTPError as error:
    assert (error.code, error.headers["x-should-retry"]) == (503, "false")
ask([*task["messages"], *task["messages"]])
reward(0)
"""
    producer, refused = make(code), set()

    def speech(prompt: str, seed: int) -> str:
        if prompt.count("17") == 1 and not refused:  # of one episode, whichever is first
            refused.add(seed)
            raise RequestRefusedError("a broken kernel")
        return " It is 42."

    producer.core.speech = speech
    (rolled_out,) = producer.run()
    assert sorted(score.verdict for score in rolled_out.scores.values()) == ["invalid", "wrong"]
    (detail,) = [score.detail for score in rolled_out.scores.values() if score.verdict == "invalid"]
    assert detail == "agent: a broken kernel"


def test_an_agent_that_is_cut_while_it_waits_for_a_place_is_never_started(make, tmp_path) -> None:
    code = "open(f'{os.path.dirname(sys.argv[0])}/started-{task[\"episode\"]}', 'w'); ask(task['messages'])\n"
    producer = make(code + "time.sleep(600)", max_processes=1)
    producer.submit(group_size=3)
    wait_for(producer, lambda: producer.core.requests and not producer.core.running)
    producer.runner.cut([0])
    (rolled_out,) = producer.finish()
    assert rolled_out.error.startswith("all 3 episodes failed, the first one because: agent: it was cut")
    assert len(list(tmp_path.glob("started-*"))) == 1


def test_a_prompt_fails_if_all_of_its_agents_do(make) -> None:
    (rolled_out,) = make("sys.exit(7)").run()
    assert rolled_out.error == "all 2 episodes failed, the first one because: agent: exit code 7"


def test_a_command_that_the_system_does_not_start_is_a_failed_episode() -> None:
    producer = Producer("", command=("true", "x" * 200_000))
    try:
        (rolled_out,) = producer.run()
    finally:
        producer.close()
    cause = "agent: it could not be started: [Errno 7] Argument list too long"
    assert rolled_out.error.startswith(f"all 2 episodes failed, the first one because: {cause}")


def test_agents_that_are_cut_are_invalid_and_those_that_have_ended_are_not(make) -> None:
    producer = make("if task['episode'] == 1:\n    ask(task['messages'])\n    time.sleep(600)\n" + TWO_TURNS)
    producer.submit()
    wait_for(producer, lambda: len(producer.core.requests) == 3 and not producer.core.running)
    wait_for(producer, lambda: len(producer.engine._admission.open_episodes()) == 1)
    producer.runner.cut([0])
    (rolled_out,) = producer.finish()
    assert [score.verdict for score in rolled_out.scores.values()] == ["ok", "invalid"]
    assert rolled_out.scores[1].detail == "agent: it was cut, as trainers waited for it (--stale-episodes cut)"


def test_the_end_of_the_engine_ends_the_producer_and_the_agents(make) -> None:
    producer = make("ask(task['messages']); time.sleep(600)")
    producer.submit(group_size=1)
    wait_for(producer, lambda: producer.core.requests)
    producer.engine.close()
    with pytest.raises(EngineError):
        producer.runner.take_finished(1.0)
    begin = time.monotonic()
    producer.runner.close()
    producer.environment.close()
    assert time.monotonic() - begin < 10
    assert not producer.environment._directory.exists()
