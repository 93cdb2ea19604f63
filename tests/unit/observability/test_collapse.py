"""Test when the records of a run give a warning: once, at the step that shows it."""

import pytest

from coati_rl.observability.collapse import CollapseWatch

HEALTHY = {
    "reward_mean": 0.5,
    "answer_accuracy": 0.5,
    "reward_std": 0.5,
    "entropy_mean": 1.0,
    "response_tokens_mean": 20.0,
    "response_tokens_max": 32,
    "num_response_tokens": 1280,  # of 64 responses
    "distinct_response_fraction": 0.75,
    "groups_total": 8,
}


def told(*changes, threshold=None):
    """Return the warnings of a run of healthy records with these changes, by step, shortened to their first clause."""
    watch = CollapseWatch(threshold)
    found = {}
    for step, change in enumerate(changes, 1):
        if warnings := watch.warnings({"step": step, **HEALTHY, **change}):
            found[step] = [warning.partition(";")[0] for warning in warnings]
    return found


ONE_TOKEN = {"response_tokens_mean": 1.0, "response_tokens_max": 1, "num_response_tokens": 64}
SAME = {**ONE_TOKEN, "distinct_response_fraction": 1 / 64}


def test_a_healthy_run_gives_none():
    assert told(*[{}] * 4, {"entropy_mean": 0.05, "response_tokens_max": 8, "response_tokens_mean": 6.0}) == {}


def test_responses_that_are_all_the_same_are_told_once_until_they_differ_again():
    text = "the policy may have collapsed: all 64 responses of 8 prompts are the same, 1 token"
    assert told({}, SAME, SAME, SAME, {}, SAME) == {2: [f"step 2: {text}"], 6: [f"step 6: {text}"]}
    assert told(SAME) == {1: [f"step 1: {text}"]}, "also from the first step on"
    assert told({}, {**SAME, "groups_total": 1}) == {
        2: ["step 2: the policy may have collapsed: no response is longer than 1 token"]
    }


def test_responses_of_a_few_tokens_are_a_collapse_only_where_they_were_longer():
    short = {"response_tokens_mean": 3.0, "response_tokens_max": 4, "num_response_tokens": 192}
    assert told({}, short) == {2: ["step 2: the policy may have collapsed: no response is longer than 4 tokens"]}
    longer = {"response_tokens_mean": 5.0, "response_tokens_max": 6}
    assert list(told({}, short, longer, short, {}, short)) == [2, 6], "not again before they were clearly longer"
    assert told(short, short) == {}, "as a task of short answers has them"
    assert told(ONE_TOKEN) == {1: ["step 1: the policy may have collapsed: no response is longer than 1 token"]}


def test_an_entropy_near_zero_is_a_collapse_where_it_began_higher():
    low = {"entropy_mean": 0.001}
    assert told({}, low, low, {"entropy_mean": 0.03}, low) == {
        2: [
            "step 2: the policy may have collapsed: its entropy is 0.001 nats per token, 1 at the start, so that a "
            "prompt's samples hardly differ"
        ]
    }, "and not again before it was clearly higher"
    assert list(told({}, low, {"entropy_mean": 0.5}, low)) == [2, 4]
    assert told(low, low) == {}
    assert told({}, {"entropy_mean": 0.03}) == {}, "a policy that is sure of its answers"


def test_where_nothing_can_count_as_correct_it_is_told_once_after_five_steps():
    wrong = {"answer_accuracy": 0.0, "reward_mean": 0.3}
    line = "nothing has reached --correct-from 1 in 5 steps, so that accuracy is 0"
    assert told(*[wrong] * 20, threshold=1.0) == {5: [line]}
    assert told(*[wrong] * 20) == {}, "no threshold decides"
    assert told({}, *[wrong] * 20, threshold=1.0) == {}, "something was correct"
    assert told(*[{**wrong, "reward_std": 0.0}] * 20, threshold=1.0) == {}, "all rewards are 0, as of a hard task"


@pytest.mark.parametrize(
    "record", [{"step": 1, "loss": 0.5, "entropy_mean": 0.5}, {"step": 1, **dict.fromkeys(HEALTHY)}]
)
def test_records_of_other_jobs_and_of_later_updates_give_none(record):
    watch = CollapseWatch(1.0)
    assert watch.warnings(record) == [] and watch.warnings({**record, "step": 2, "entropy_mean": 0.0}) == []
