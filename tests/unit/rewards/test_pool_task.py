"""Test how a submission is split into tasks, requested, and collected."""

import json

from coati_rl.types import Problem, Score
from rewards.workers.task import ResponseGroup

PROBLEM = Problem(ground_truth="5", uid="7-0", messages=({"role": "user", "content": "2 + 3?"},), prompt="2 + 3?")


def score(reward: float) -> Score:
    return Score(reward=reward, answer_correct=True, format_valid=True, verdict="ok")


def test_each_response_is_a_task_but_for_a_batch_reward() -> None:
    group = ResponseGroup(["a", "b", "c"], PROBLEM, chunk_size=2)
    assert [(task.start, task.stop, task.size) for task in group.tasks(is_batch=False)] == [
        (0, 1, 1),
        (1, 2, 1),
        (2, 3, 1),
    ]
    assert [(task.start, task.stop, task.size) for task in group.tasks(is_batch=True)] == [(0, 3, 3)]


def test_no_responses_are_no_tasks() -> None:
    assert list(ResponseGroup([], PROBLEM, chunk_size=0).tasks(is_batch=True)) == []
    assert list(ResponseGroup([], PROBLEM, chunk_size=0).tasks(is_batch=False)) == []


def test_a_request_is_one_line_with_the_problem_and_the_responses_asked_for() -> None:
    line = ResponseGroup(["a\nb", "c", "\ud800"], PROBLEM, chunk_size=2).request(0, 2)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    problem, responses = json.loads(line)
    assert Problem(**{**problem, "messages": tuple(problem["messages"])}) == PROBLEM
    assert responses == ["a\nb", "c"]


def test_a_response_with_half_a_character_crosses_as_it_is() -> None:
    _, responses = json.loads(ResponseGroup(["\ud800"], PROBLEM, chunk_size=1).request(0, 1))
    assert responses == ["\ud800"]


def test_scores_are_put_together_in_the_order_of_the_responses() -> None:
    group = ResponseGroup(["a", "b", "c"], PROBLEM, chunk_size=2)
    assert not group.settle(2, [score(3.0)])
    assert group.settle(0, [score(1.0), score(2.0)])
    assert [each.reward for each in group.all_scores()] == [1.0, 2.0, 3.0]
