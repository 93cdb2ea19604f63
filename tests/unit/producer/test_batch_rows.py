"""Test the rows of a group: all samples, the best one, pairs, a reward in the prompt; and the figures of all."""

import dataclasses
import json

import pytest

from coati_rl.reading.row_formats import read_forms
from coati_rl.types import Prompt
from producer.batch.rows import Selection, group_record, make_rows
from producer.batch.summary import summarise
from rewards.commands.score_command import parse_line
from tests.unit.groups import group_of

__all__ = ["group_of"]

MESSAGES = ({"role": "system", "content": "Add."}, {"role": "user", "content": "1+3?"})


@pytest.fixture
def group(group_of):
    """Samples with rewards 0, 1, 1, none, -1; the texts are as long as their tokens."""
    made = group_of([(0.0, 1), (1.0, 2), (1.0, 3), (9.0, 4, "invalid"), (-1.0, 5, "ok", "length")])
    prompt = Prompt(uid="p0", token_ids=(1, 2, 3), ground_truth="4", messages=MESSAGES)
    return dataclasses.replace(made, prompt=prompt)


def test_every_sample_is_a_conversation_with_its_score_and_its_size(group):
    rows = make_rows(group, Selection())
    assert [row["sample"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[4] == {
        "uid": "p0",
        "sample": 4,
        "messages": [*MESSAGES, {"role": "assistant", "content": "xxxxx"}],
        "response": "xxxxx",
        "finish_reason": "length",
        "num_prompt_tokens": 3,
        "num_response_tokens": 5,
        "gt_answer": "4",
        "reward": -1.0,
        "answer_correct": False,
        "format_valid": True,
        "verdict": "ok",
        "detail": "",
    }


def test_without_rewards_a_row_has_none(group):
    (row, *_) = make_rows(group, Selection(is_scored=False))
    assert not {"reward", "verdict", "gt_answer"} & row.keys()
    assert row["messages"][-1] == {"role": "assistant", "content": "x"}


def test_the_best_is_the_first_of_the_highest_reward_and_never_one_without_a_verdict(group):
    (row,) = make_rows(group, Selection(best_of=True))
    assert (row["sample"], row["reward"]) == (1, 1.0)


def test_a_minimum_leaves_samples_out_and_those_without_a_verdict(group):
    assert [row["sample"] for row in make_rows(group, Selection(min_reward=0.0))] == [0, 1, 2]
    assert make_rows(group, Selection(best_of=True, min_reward=2.0)) == []


def test_a_pair_is_the_best_and_the_worst_sample_after_the_same_prompt(group):
    (row,) = make_rows(group, Selection(pairs=True))
    assert row == {
        "uid": "p0",
        "prompt": [*MESSAGES],
        "chosen": [{"role": "assistant", "content": "xx"}],
        "rejected": [{"role": "assistant", "content": "xxxxx"}],
        "chosen_reward": 1.0,
        "rejected_reward": -1.0,
    }
    assert make_rows(group, Selection(pairs=True, min_reward=1.5)) == []


@pytest.mark.parametrize("samples", [[(1.0, 2), (1.0, 3)], [(1.0, 2), (0.0, 3, "invalid")], [(0.0, 1, "invalid")] * 2])
def test_samples_that_are_equally_good_make_no_pair(group_of, samples):
    assert make_rows(group_of(samples), Selection(pairs=True)) == []


def test_a_template_puts_the_reward_into_the_last_question(group):
    rows = make_rows(group, Selection(reward_template="{input} <rm_score>: {reward} "))
    assert [row["messages"][1]["content"] for row in rows] == [
        "1+3? <rm_score>: 0 ",
        "1+3? <rm_score>: 1 ",
        "1+3? <rm_score>: 1 ",
        "1+3? <rm_score>: -1 ",
    ]
    assert rows[0]["messages"][0] == MESSAGES[0]
    assert group.prompt.messages == MESSAGES, "the prompt itself stays"


def test_the_figures_are_over_all_prompts_and_a_failed_one_counts_as_wrong_samples(group_of):
    first = group_record(group_of([(1.0, 2), (0.0, 3, "ok", "length")]))
    second = group_record(group_of([(0.5, 4, "invalid"), (-1.0, 1)]))
    records = [{**first, "num_rows": 2}, {**second, "num_rows": 1}, {"error": "too long", "num_rows": 0}]
    assert summarise(records, group_size=2, is_scored=True) == {
        "num_prompts": 3,
        "num_failed": 1,
        "num_samples": 4,
        "num_rows": 3,
        "num_response_tokens": 10,
        "truncated_fraction": 0.25,
        "num_invalid": 1,
        "reward_mean": 0.0,
        "best_reward_mean": 0.0,
        "accuracy": pytest.approx(2 / 6),
        "avg@2": pytest.approx(2 / 6),
        "pass@1": pytest.approx(2 / 6),
        "pass@2": pytest.approx(2 / 3),
    }


def test_rows_and_pairs_are_read_by_the_jobs_on_datasets(group):
    (conversation, *_) = read_forms([("row", row) for row in make_rows(group, Selection())], "sft").forms
    assert conversation.messages == (*MESSAGES, {"role": "assistant", "content": "x"})
    (pair,) = read_forms([("row", row) for row in make_rows(group, Selection(pairs=True))], "dpo").forms
    assert (pair.prompt, pair.margin) == (MESSAGES, 0.0)
    assert (pair.chosen, pair.rejected) == tuple(({"role": "assistant", "content": "x" * n},) for n in (2, 5))


@pytest.mark.parametrize("truth", ["4", '{"inputs": ["1"], "outputs": ["' + "x" * 5000 + '"]}'])
def test_a_row_is_scored_once_more_as_the_answer_to_its_prompt(group, truth):
    (row, *_) = make_rows(replaced_truth(group, truth), Selection())
    response, problem = parse_line(json.dumps(row).encode(), 1)
    assert (response, problem.messages, problem.ground_truth) == ("x", MESSAGES, truth)


def replaced_truth(group, truth):
    return dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, ground_truth=truth))
