"""Test of which weights old_logprobs are, where a loop of one's own computes them with the trainer."""

from typing import Any

import numpy as np
import pytest

import coati
from tests.unit.loops.test_library import GRPO

PROMPT = np.array([40, 41, 42, 43], dtype=np.int32)
ANSWERS = np.random.default_rng(0).integers(0, 256, (4, 8)).astype(np.int32)
RATE = 1e-2


def trainer_of(model_dir: Any, **flags: Any) -> coati.Trainer:
    return coati.Trainer(model_dir, "grpo", **{**GRPO, "old_logprobs": "trainer", **flags})


def samples_of(version: int | None) -> list[coati.Sample]:
    of_version = {} if version is None else {"policy_version": np.full(8, version, dtype=np.int32)}
    return [
        coati.Sample(
            uid="p",
            number=number,
            prefix_ids=PROMPT,
            token_ids=answer,
            loss_mask=np.ones(8, dtype=bool),
            arrays={"advantages": (-1.0) ** number, "rollout_logprobs": np.full(8, -5.0, np.float32), **of_version},
        )
        for number, answer in enumerate(ANSWERS)
    ]


def ratios(trainer: coati.Trainer, *versions: int) -> list[float]:
    """Return the largest ratio to the old policy in a call for each version, after which a step is taken."""
    found = [trainer.forward_backward(samples_of(version))["ratio_max"] for version in versions]
    assert trainer.optim_step(RATE)["grad_norm"] > 0
    return found


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"old_logprobs": "auto", "off_policy_correction": "tis"},
        {"inference_batch_size": 16, "train_batch_size": 16},  # a run would have a sync after each step
        {"lora_rank": 4},
        {"updates_per_batch": 2},
    ],
)
def test_old_logprobs_are_of_the_policy_before_the_first_step_on_the_samples_of_newer_weights(
    model_dir: Any, flags: dict[str, Any]
) -> None:
    with trainer_of(model_dir, clip_eps_high=9.0, clip_eps_low=0.9, **flags) as trainer:
        assert ratios(trainer, 0, 0) == [1.0, 1.0]  # calls of one step
        (second,) = ratios(trainer, 0)
        assert second > 1.0, "another step on samples of the same weights"
        assert ratios(trainer, 2, 2) == [1.0, 1.0]
        late, same = ratios(trainer, 1, 2)  # samples of earlier weights that come late do not move it
        assert late == same > 1.0
        assert ratios(trainer, 4) == [1.0]


def test_a_loaded_trainer_takes_the_samples_of_an_earlier_version_for_newer_ones(model_dir: Any, tmp_path: Any) -> None:
    with trainer_of(model_dir) as trainer:
        ratios(trainer, 0)
        trainer.save(tmp_path / "step-1")
        ratios(trainer, 7)
        trainer.load(tmp_path / "step-1")
        assert ratios(trainer, 1) == [1.0]
        assert ratios(trainer, 2) == [1.0]


def test_a_loss_without_an_old_policy_takes_samples_without_a_version(model_dir: Any) -> None:
    def own(logprobs: Any, entropy: Any, arrays: Any) -> Any:
        return -(logprobs * arrays["advantages"])[arrays["loss_mask"]].sum()

    with coati.Trainer(model_dir, own, max_prompt_tokens=32, max_new_tokens=8) as trainer:
        trainer.forward_backward(samples_of(None))
        assert trainer.optim_step(RATE)["grad_norm"] > 0
