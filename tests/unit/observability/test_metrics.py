"""The record of a step: which keys it has, and how a person reads it."""

import pytest

from coati_rl.observability.metrics import METRIC_KEYS, complete, step_line, tokens_per_s

# The contract that scripts and users rely on (docs: metrics.jsonl), and what the algorithms add.
CONTRACT = [
    "step", "policy_version", "time_s", "reward_mean", "answer_accuracy", "format_accuracy",
    "response_tokens_mean", "truncated_fraction", "groups_total", "groups_filtered", "loss", "kl_mean",
    "entropy_mean", "clip_fraction", "ratio_max", "grad_norm", "learning_rate", "staleness_mean",
    "staleness_max", "logprob_gap_mean", "logprob_gap_max", "num_prompt_tokens", "num_response_tokens",
    "rollout_wait_s", "train_s", "sync_s",
]  # fmt: skip
OURS = [
    "samples_failed", "samples_invalid", "samples_in_loss", "samples_skipped", "over_length_penalty_mean",
    "correction_mean", "correction_dropped_fraction", "old_logprob_gap_mean", "old_logprob_gap_max",
    "trainer_idle_fraction", "producer_idle_fraction", "logprob_gap_tokens",
]  # fmt: skip

RECORD = {
    "step": 3,
    "reward_mean": 0.5,
    "answer_accuracy": 0.25,
    "loss": -0.01,
    "num_response_tokens": 600,
    "rollout_wait_s": 1.0,
    "train_s": 1.5,
    "sync_s": 0.5,
    "staleness_mean": 0.0,
    "logprob_gap_mean": 2e-6,
}


def test_the_keys_are_those_of_the_contract_and_ours():
    assert len(METRIC_KEYS) == len(set(METRIC_KEYS))
    assert set(METRIC_KEYS) == {*CONTRACT, *OURS}


def test_a_complete_record_has_all_keys_in_order_and_null_where_there_is_no_value():
    record = complete({"extra": 1, **RECORD})
    assert list(record) == [*METRIC_KEYS, "extra"]
    assert record["kl_mean"] is None
    assert record["loss"] == -0.01


def test_the_parts_of_a_reward_follow_the_keys_that_every_record_has():
    assert [*complete({"reward/boxed": 0.5, **RECORD})] == [*METRIC_KEYS, "reward/boxed"]


def test_throughput_is_response_tokens_over_the_steps_wall_time():
    assert tokens_per_s(RECORD) == 200.0  # 600 / (1 + 1.5 + 0.5)
    assert tokens_per_s({**RECORD, "rollout_wait_s": None, "train_s": None, "sync_s": None}) == 0.0


@pytest.mark.parametrize(
    ("change", "num_steps", "line"),
    [
        (
            {"reward_mean": None, "answer_accuracy": None},
            10,
            "step 3/10  reward -  accuracy -  loss -0.0100  200 tok/s  staleness 0.00  gap 2.0e-06",
        ),
        ({}, 10, "step 3/10  reward 0.500  accuracy 0.250  loss -0.0100  200 tok/s  staleness 0.00  gap 2.0e-06"),
        (
            {"logprob_gap_mean": None},
            None,
            "step 3  reward 0.500  accuracy 0.250  loss -0.0100  200 tok/s  staleness 0.00  gap -",
        ),
        (
            {"loss": None, "logprob_gap_mean": None},  # no sample in the loss
            10,
            "step 3/10  reward 0.500  accuracy 0.250  loss -  200 tok/s  staleness 0.00  gap -",
        ),
    ],
)
def test_a_step_is_one_line_for_people(change, num_steps, line):
    assert step_line({**RECORD, **change}, num_steps) == line
