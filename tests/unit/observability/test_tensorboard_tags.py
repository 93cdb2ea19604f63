"""Sections of TensorBoard: every metric has one, and the one of its kind."""

import pytest

from coati_rl.observability.tensorboard_tags import tag_of
from tests.metric_names import ROLLOUT_RUN


@pytest.mark.parametrize(
    ("key", "tag"),
    [
        ("loss", "train/loss"),
        ("reward_mean", "rollouts/reward_mean"),
        ("reward_mean/math", "rollouts/reward_mean/math"),
        ("reward/format", "reward/format"),
        ("rewards/chosen", "rewards/chosen"),
        ("eval/math/accuracy", "eval/math/accuracy"),
        ("agent/score_mean", "agent/score_mean"),
        ("old_logprob_gap_max", "mismatch/old_logprob_gap_max"),
        ("samples_skipped", "train/samples_skipped"),
        ("train_s", "time/train_s"),
        ("disk_free_gib", "machine/disk_free_gib"),
        ("a_metric_that_an_algorithm_adds", "train/a_metric_that_an_algorithm_adds"),
    ],
)
def test_a_metric_is_in_the_section_of_its_kind(key, tag) -> None:
    assert tag_of(key) == tag


def test_what_is_in_train_of_a_run_with_producers_is_what_trainers_report() -> None:
    assert {key for key in ROLLOUT_RUN if tag_of(key).startswith("train/")} == {
        *("step", "policy_version", "loss", "kl_mean", "teacher_kl_mean", "entropy_mean", "clip_fraction", "ratio_max"),
        *("kl_coeff", "entropy_coeff", "masked_token_fraction"),
        *("grad_norm", "learning_rate", "samples_skipped", "correction_mean", "correction_dropped_fraction"),
    }
