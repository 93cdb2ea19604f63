"""Test the record of a step: described keys, and its line for display."""

from pathlib import Path

import pytest

from coati_rl.observability.metrics import step_line, tokens_per_s
from tests.metric_names import ROLLOUT_RUN

RECORD = {
    "step": 3,
    "reward_mean": 0.5,
    "answer_accuracy": 0.25,
    "loss": -0.01,
    "num_response_tokens": 600,
    "step_s": 3.0,
    "rollout_wait_s": 0.5,
    "train_s": 1.5,
    "sync_s": 0.5,
    "staleness_mean": 0.0,
    "logprob_gap_mean": 2e-6,
}
NO_GAP = {"logprob_gap_mean": None}


def test_every_key_of_a_rollout_run_is_described():
    described = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert [key for key in sorted(ROLLOUT_RUN) if f"`{key}`" not in described] == []


def test_throughput_is_response_tokens_over_the_steps_wall_time():
    assert tokens_per_s(RECORD) == 200.0  # 600 / 3, and not over what was measured of it
    assert tokens_per_s({**RECORD, "step_s": None}) == 0.0


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
            NO_GAP,
            None,
            "step 3  reward 0.500  accuracy 0.250  loss -0.0100  200 tok/s  staleness 0.00  gap -",
        ),
        (
            {"loss": None, **NO_GAP},  # no sample in the loss
            10,
            "step 3/10  reward 0.500  accuracy 0.250  loss -  200 tok/s  staleness 0.00  gap -",
        ),
        (
            {"update": 0},
            10,
            "step 3/10  update 0  reward 0.500  accuracy 0.250  loss -0.0100  200 tok/s  staleness 0.00  gap 2.0e-06",
        ),
        (
            {"update": 1, "reward_mean": None, "answer_accuracy": None, "num_response_tokens": 0, **NO_GAP},
            10,
            "step 3/10  update 1  loss -0.0100  staleness 0.00",
        ),
    ],
)
def test_a_step_is_one_line_for_people(change, num_steps, line):
    assert step_line({**RECORD, **change}, num_steps) == line


def test_a_record_without_rollouts_is_shown_without_what_it_lacks():
    record = {"step": 2, "loss": 1.5, "perplexity": 4.4817, "loss_tokens": 90, "step_s": 0.3, "train_s": 0.2}
    assert step_line(record, 4) == "step 2/4  loss +1.5000  perplexity 4.482  300 tok/s"
