"""Evaluate TRL's loss and ours on the same tensors.

TRL's own `_compute_loss` runs, on an object that has only the attributes it reads.
"""

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coati_rl.algorithms.aggregation import loss_scale, token_weight
from coati_rl.algorithms.loss import PolicyLoss
from tests.unit.algorithms.batches import evaluate

LENGTHS = (4, 1, 7, 2, 5)
B, T = len(LENGTHS), 8  # responses, columns; TRL's padding must be finite
L_MAX = 16
MEAN_OVER = {**dict.fromkeys(("dapo", "bnpo", "cispo"), "token_level"), "grpo": "sample_level", "dr_grpo": "constant"}


def make_tensors(seed: int, *, spread: float = 0.5) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    logprobs = -rng.uniform(0.05, 4, (B, T))
    tensors = {"logprobs": logprobs, "entropy": rng.uniform(0, 2, (B, T))}
    for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs"):
        tensors[name] = logprobs + spread * rng.normal(size=(B, T))
    tensors["advantages"] = np.repeat(rng.normal(size=(B, 1)), T, axis=1)
    tensors["loss_mask"] = np.arange(T)[None] < np.array(LENGTHS)[:, None]
    return {name: torch.tensor(values) for name, values in tensors.items()}


def theirs(
    trl: SimpleNamespace,
    tensors: dict[str, Tensor],
    *,
    compute_loss: Any = None,
    kept: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[float, Tensor, dict[str, float]]:
    """(loss, gradient of log-probabilities, metrics); settings are TRL's; `kept` gets its attributes afterwards."""
    leaf = tensors["logprobs"].clone().requires_grad_()
    args = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}
    args |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    args |= {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    args |= {"entropy_target": 0.0, "entropy_coef_delta": 0.0, "entropy_coef_max": 0.0, "entropy_coef_min": 0.0}
    args |= {name: settings.pop(name) for name in [*settings] if name in args}
    metrics: dict[str, list[float]] = defaultdict(list)
    stand_in = {
        "_get_per_token_logps_and_entropies": lambda *_, **__: (leaf, tensors["entropy"], None),
        "_metrics": {"train": metrics},
        "_entropy_bonus_enabled": settings.get("entropy_coef", 0.0) > 0 or settings.get("use_adaptive_entropy", False),
        "accelerator": SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            pad_across_processes=lambda x, **_: x,
        ),
        "get_off_policy_mask": trl.trainer.get_off_policy_mask,
        "get_gamma_weights": trl.trainer.get_gamma_weights,
        "args": SimpleNamespace(**args),
        "aux_loss_enabled": False,
        "beta": 0.0,
        "current_gradient_accumulation_steps": 1,
        "entropy_coef": 0.0,
        "epsilon_high": 0.28,
        "epsilon_low": 0.2,
        "importance_sampling_level": "token",
        "loss_type": "grpo",
        "max_completion_length": L_MAX,
        "model": SimpleNamespace(training=True),
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        "use_adaptive_entropy": False,
        "use_vllm": "importance_sampling_ratio" in settings,
        "vllm_importance_sampling_correction": True,
    }
    mask = tensors["loss_mask"].long()
    ids = torch.zeros(B, T, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": tensors["advantages"][:, 0],
        "old_per_token_logps": tensors["old_logprobs"],
        "ref_per_token_logps": tensors["ref_logprobs"],
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": settings.pop("importance_sampling_ratio", None),
    }
    if settings.get("off_policy_mask_threshold") is not None:
        inputs["sampling_per_token_logps"] = tensors["rollout_logprobs"]
    trainer = SimpleNamespace(**{**stand_in, **settings})
    trainer.get_high_entropy_mask = partial(trl.trainer.get_high_entropy_mask, trainer)
    loss = (compute_loss or trl.trainer._compute_loss)(trainer, None, inputs)
    loss.backward()
    if kept is not None:
        kept |= vars(trainer)
    return loss.item(), leaf.grad, {name: values[0] for name, values in metrics.items()}


def ours(loss: PolicyLoss, tensors: dict[str, Tensor], mode: str) -> tuple[float, Tensor, dict[str, float]]:
    """(loss, gradient of log-probabilities, report), with the weights and the scale of an aggregation."""
    mask = tensors["loss_mask"]
    weights = torch.tensor([token_weight(length, mode, max_length=L_MAX) for length in LENGTHS], dtype=torch.float64)
    arrays = {
        **tensors,
        "loss_weights": torch.where(mask, weights[:, None], 0.0),
        "sample_index": torch.where(mask, torch.arange(B)[:, None], -1),
        "policy_version": torch.zeros(B, T, dtype=torch.int32),
        "trainer_version": torch.tensor(0),
    }
    value, sums, gradients = evaluate(loss, arrays)
    scale = loss_scale(B, sum(LENGTHS), mode)
    return value * scale, gradients["logprobs"] * scale, {name: total.item() for name, total in sums.items()}


def assert_same(found: tuple[float, Tensor, Any], expected: tuple[float, Tensor, Any]) -> None:
    """Loss and gradient, to the rounding of float64."""
    assert found[0] == pytest.approx(expected[0], rel=1e-12, abs=1e-14)
    np.testing.assert_allclose(found[1].numpy(), expected[1].numpy(), rtol=1e-12, atol=1e-15)


SEEDS = pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3))])
