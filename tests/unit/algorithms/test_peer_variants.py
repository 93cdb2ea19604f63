"""Compare what later papers change of the loss with TRL's code on the same tensors."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from coati_rl.algorithms.coefficients import Coefficients, EntropyControl
from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.algorithms.token_selection import SelectedTokens
from tests.micro_batches import grid_micro_batch
from tests.unit.algorithms.batches import numbers
from tests.unit.algorithms.trl_losses import LENGTHS, SEEDS, B, T, assert_same, make_tensors, ours, theirs

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore:TRL currently supports vLLM")]


@SEEDS
@pytest.mark.parametrize("spread", [0.02, 0.3])
def test_vespo_is_trls(trl: SimpleNamespace, seed: int, spread: float) -> None:
    tensors = make_tensors(seed, spread=spread)
    loss = PolicyLoss(policy_loss="vespo", vespo_positive=(1.5, 2.5), vespo_negative=(3.0, 2.0))
    shape = {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    assert_same(ours(loss, tensors, "token_level"), theirs(trl, tensors, loss_type="vespo", **shape))


@SEEDS
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_gmpo_is_trls(trl: SimpleNamespace, seed: int, beta: float) -> None:
    tensors = make_tensors(seed)
    loss = PolicyLoss(policy_loss="gmpo", clip_low=0.4, clip_high=0.3, kl_coeff=beta)
    found = ours(loss, tensors, "sample_level")
    expected = theirs(trl, tensors, compute_loss=trl.gmpo, epsilon_low=0.4, epsilon_high=0.3, beta=beta)
    assert_same(found, expected)
    assert found[2]["clip_sum"] / sum(LENGTHS) == pytest.approx(expected[2]["clip_ratio/region_mean"], rel=1e-6)


@SEEDS
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_kl_weighed_by_the_ratio_is_trls(trl: SimpleNamespace, seed: int, level: str) -> None:
    tensors = make_tensors(seed)
    loss = PolicyLoss(clip_high=0.28, kl_coeff=0.1, kl_has_ratio=True, ratio_level=level)
    settings: dict[str, Any] = {"use_bias_correction_kl": True, "importance_sampling_level": level}
    assert_same(ours(loss, tensors, "sample_level"), theirs(trl, tensors, beta=0.1, **settings))


@SEEDS
def test_off_policy_sequence_masking_is_trls(trl: SimpleNamespace, seed: int) -> None:
    tensors = make_tensors(seed)
    drift = [(tensors["rollout_logprobs"] - tensors["logprobs"])[i, :n].mean().item() for i, n in enumerate(LENGTHS)]
    threshold = float(np.median(drift))  # about half of the samples are beyond it
    found = ours(PolicyLoss(clip_high=0.28, drift_threshold=threshold), tensors, "sample_level")
    assert_same(found, theirs(trl, tensors, off_policy_mask_threshold=threshold))
    is_left_out = [d > threshold and tensors["advantages"][i, 0] < 0 for i, d in enumerate(drift)]
    assert found[2]["drifted_tokens"] == sum(n for n, out in zip(LENGTHS, is_left_out, strict=True) if out)


@SEEDS
@pytest.mark.parametrize(("low", "high"), [(0.0, 2.0), (0.5, 1.5)])
def test_weights_of_whole_samples_are_trls_sequence_truncate(
    trl: SimpleNamespace, seed: int, low: float, high: float
) -> None:
    tensors = make_tensors(seed)
    loss = PolicyLoss(clip_high=0.28, correction="sequence_tis", correction_low=low, correction_high=high)
    # As their _generate_and_score_completions has it.
    logs = (tensors["old_logprobs"] - tensors["rollout_logprobs"]) * tensors["loss_mask"]
    ratio = torch.exp(logs.sum(dim=-1, keepdim=True)).clamp(min=low, max=high)
    assert_same(ours(loss, tensors, "sample_level"), theirs(trl, tensors, importance_sampling_ratio=ratio))


@SEEDS
@pytest.mark.parametrize("fraction", [0.2, 0.5])
def test_the_policy_term_of_tokens_of_high_entropy_alone_is_trls(
    trl: SimpleNamespace, seed: int, fraction: float
) -> None:
    tensors = make_tensors(seed)
    tensors["entropy"] = tensors["entropy"].float().double()  # theirs compares float32
    shape = (B, T)
    micro_batch = grid_micro_batch(
        token_ids=np.zeros(shape, np.int64),
        position_ids=np.zeros(shape, np.int64),
        sample_index=torch.where(tensors["loss_mask"], torch.arange(B)[:, None], -1).numpy(),
        loss_mask=tensors["loss_mask"].numpy(),
        old_entropy=tensors["entropy"].numpy().astype(np.float32),
        advantages=np.zeros(shape, np.float32),
        rollout_logprobs=np.zeros(shape, np.float32),
    )
    # Theirs keeps floor(fraction * (N - 1)) + 1 of N tokens.
    kept = (int(fraction * (sum(LENGTHS) - 1)) + 1) / sum(LENGTHS) + 1e-9
    (marked,) = SelectedTokens(selection="top_entropy", fraction=kept)([micro_batch], numbers)
    tensors["left_out"] = torch.tensor(marked.loss_arrays["left_out"])
    found = ours(PolicyLoss(clip_high=0.28, kl_coeff=0.1), tensors, "token_level")
    assert_same(found, theirs(trl, tensors, loss_type="dapo", beta=0.1, top_entropy_quantile=fraction))


def test_the_adaptive_weight_of_the_entropy_bonus_takes_trls_steps(trl: SimpleNamespace) -> None:
    own = Coefficients(entropy_coeff=0.01, entropy_control=EntropyControl(target=1.0, delta=0.004, largest=0.02))
    trainer: dict[str, Any] = {"entropy_coef": 0.01, "_last_world_entropy": float("inf")}
    args = {"entropy_target": 1.0, "entropy_coef_delta": 0.004, "entropy_coef_max": 0.02, "entropy_coef_min": 0.0}
    for seed in range(12):
        tensors = make_tensors(seed)
        tensors["entropy"] = tensors["entropy"] * (1.3 if seed > 5 else 0.7)
        loss = PolicyLoss(clip_high=0.28, entropy_coeff=own.applied_entropy_coeff)
        found = ours(loss, tensors, "token_level")
        kept: dict[str, Any] = {}
        settings = {**trainer, **args, "use_adaptive_entropy": True, "_entropy_window_stats": None}
        assert_same(found, theirs(trl, tensors, loss_type="dapo", kept=kept, **settings))
        entropy = tensors["entropy"][tensors["loss_mask"]].mean().item()
        own.end_step(kl=None, num_samples=0, entropy=entropy)
        trainer = {name: kept[name] for name in trainer}
        assert trainer["entropy_coef"] == pytest.approx(own.entropy_coeff)
        assert trainer["_last_world_entropy"] == pytest.approx(entropy)
    assert own.last_entropy is not None
