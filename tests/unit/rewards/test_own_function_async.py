"""Test a user's reward function that is a coroutine function."""

from collections.abc import Callable
from pathlib import Path
from time import monotonic

import pytest

from coati_rl.types import Problem
from rewards.own_function import OwnFunctionReward

PROBLEM = Problem(ground_truth="4", prompt="2+2?")


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], OwnFunctionReward]:
    """The source of a file with a function `score` -> the reward."""

    def make(source: str) -> OwnFunctionReward:
        path = tmp_path / "mine.py"
        path.write_text(f"import asyncio, functools\n{source}\n", encoding="utf-8")
        return OwnFunctionReward(f"{path}:score")

    return make


@pytest.mark.parametrize(
    "source",
    [
        "async def score(messages, answer):\n    await asyncio.sleep(0)\n    return messages[-1]['content'] == answer",
        "async def score(response, ground_truth):\n    await asyncio.sleep(0)\n    return response == ground_truth",
        "async def score(queries, prompts, labels):\n    await asyncio.sleep(0)\n"
        "    return [q == p + l for q, p, l in zip(queries, prompts, labels)]",
        "async def _score(response, ground_truth, bonus):\n    return (response == ground_truth) + bonus\n"
        "score = functools.partial(_score, bonus=0)",
        "class Judge:\n    async def __call__(self, response, ground_truth):\n        return response == ground_truth\n"
        "score = Judge()",
        "async def _score(response, truth):\n    return response == truth\n"
        "def score(response, ground_truth):\n    return _score(response, ground_truth)",
    ],
)
def test_each_form_may_be_asynchronous(own, source: str) -> None:
    assert [score.reward for score in own(source).score(["4", "5"], PROBLEM)] == [1.0, 0.0]


def test_the_responses_of_a_call_are_scored_at_once_and_come_out_in_order(own) -> None:
    reward = own("async def score(response, ground_truth):\n    await asyncio.sleep(1)\n    return float(response)")
    start = monotonic()
    assert [score.reward for score in reward.score(["1", "2", "3", "4"], PROBLEM)] == [1.0, 2.0, 3.0, 4.0]
    assert monotonic() - start < 3.5  # 4 s one after another


def test_a_score_comes_as_soon_as_it_and_those_before_it_are_known(own) -> None:
    reward = own("async def score(response, ground_truth):\n    await asyncio.sleep(float(response))\n    return 1")
    start = monotonic()
    scores = reward.score(["0", "600"], PROBLEM)
    assert next(scores).reward == 1.0
    assert monotonic() - start < 60
    scores.close()
    assert [score.reward for score in reward.score(["0"], PROBLEM)] == [1.0], "what was left does not hold up the next"


def test_all_calls_share_one_event_loop(own) -> None:
    reward = own(
        "loops = []\nasync def score(response, ground_truth):\n    loops.append(asyncio.get_running_loop())\n"
        "    return len(set(loops))"
    )
    assert [score.reward for _ in range(2) for score in reward.score(["a", "b"], PROBLEM)] == [1.0] * 4


@pytest.mark.parametrize(
    "way", ["raise asyncio.CancelledError", "raise SystemExit(1)", "asyncio.current_task().cancel()"]
)
def test_a_coroutine_that_ends_its_loop_or_itself_costs_itself_only(own, way: str) -> None:
    reward = own(
        f"async def score(response, ground_truth):\n    if response == 'bad':\n        {way}\n"
        "    await asyncio.sleep(0.01)\n    return 1"
    )
    assert [s.verdict for s in reward.score(["good", "bad", "good"], PROBLEM)] == ["ok", "invalid", "ok"]


def test_a_plain_function_whose_coroutine_exits_is_invalid_and_the_next_is_scored(own) -> None:
    reward = own(
        "async def _score(response):\n    if response == 'bad':\n        raise SystemExit(1)\n    return 1\n"
        "def score(response, ground_truth):\n    return _score(response)"
    )
    scores = list(reward.score(["bad", "good"], PROBLEM))
    assert [score.verdict for score in scores] == ["invalid", "ok"]
    assert scores[0].detail == "SystemExit: 1 (mine.py:4)"
