"""Change advantages per token after the trainer has scored a batch: KL in the reward, whitening.

All sums are float64. R rows, M loss tokens per row; a row may hold several samples.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coati_rl.algorithms.choices import KLEstimator
from coati_rl.algorithms.kl import kl_terms
from coati_rl.batch import MicroBatch

VARIANCE_EPS = 1e-8  # without unit: keeps rounding noise, as of a KL of nearly 0, from becoming advantages of 1


def subtract_kl_to_go(
    micro_batch: MicroBatch, *, kl_coeff: float, estimator: KLEstimator, clamp: float | None = None
) -> tuple[MicroBatch, dict[str, Tensor]]:
    """Compute A_t - kl_coeff * sum over the tokens s >= t of the sample of kl_s, undiscounted: KL in the reward.

    It is the reward to go if each token has the reward -kl_coeff * kl_s besides the sample's own at its end. The kl is
    between old policy and reference and carries no gradient.

    Args:
        micro_batch: with ref_logprobs; rollout_logprobs stand in for old_logprobs.
        kl_coeff: weight of the penalty.
        estimator: of KL from the sampled token.
        clamp: bound of a token's estimate, nats; None: no bound.
    Returns: (the micro-batch with new advantages, {"kl_sum": float64[] over loss tokens, unweighted, nats}).
    Raises: ValueError if the micro-batch has no ref_logprobs.
    Source: arXiv:2501.03262 (REINFORCE++), arXiv:2402.14740 (RLOO); as a reward to go in OpenRLHF.
    """
    arrays = micro_batch.loss_arrays
    loss_mask, advantages = arrays["loss_mask"], arrays["advantages"]
    kl = token_kl(micro_batch, estimator=estimator, clamp=clamp)
    penalty = kl_coeff * _sums_to_go(kl, arrays["sample_index"])
    changed = np.where(loss_mask, advantages - penalty, advantages).astype(np.float32)
    return micro_batch.with_arrays(advantages=changed), {"kl_sum": torch.tensor(kl.sum())}


def token_kl(micro_batch: MicroBatch, *, estimator: KLEstimator, clamp: float | None = None) -> NDArray[np.float64]:
    """Return float64[R, M], KL between old policy and reference at each token, nats, 0 where the mask is False.

    rollout_logprobs stand in for old_logprobs. Raises: ValueError if the micro-batch has no ref_logprobs.
    """
    arrays = micro_batch.loss_arrays
    if "ref_logprobs" not in arrays:
        raise ValueError("KL in the reward needs ref_logprobs: score the batch with a reference")
    old = arrays.get("old_logprobs", arrays["rollout_logprobs"])
    mask, reference = torch.tensor(arrays["loss_mask"]), torch.tensor(arrays["ref_logprobs"])
    kl: NDArray[np.float64] = (
        kl_terms(torch.tensor(old), reference, mask, estimator=estimator, clamp=clamp).double().numpy()
    )
    return kl


def sample_parts(sample_index: NDArray[np.int32]) -> Iterator[tuple[int, slice]]:
    """Yield the row and the places of each sample's loss tokens, which are contiguous, and so of a row's padding."""
    for row, samples in enumerate(sample_index):
        if len(samples):
            starts = np.flatnonzero(np.diff(samples, prepend=samples[0] - 1)).tolist()
            for first, last in zip(starts, [*starts[1:], len(samples)], strict=True):
                yield row, slice(first, last)


def _sums_to_go(values: NDArray[np.float64], sample_index: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return [R, M]: at each token, the sum from it to the end of its sample."""
    sums = np.zeros_like(values)
    for row, part in sample_parts(sample_index):
        sums[row, part] = values[row, part][::-1].cumsum()[::-1]
    return sums


def advantage_sums(micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """Compute the sums that whitening needs of a rank's micro-batches, to be reduced over ranks by name (`sums`).

    Returns: float64[] each, over loss tokens: advantage_tokens, advantage_sum, advantage_square_sum; advantage_max and
        advantage_negative_max, the largest advantage and the largest negated one.
    """
    counted = [m.loss_arrays["advantages"][m.loss_arrays["loss_mask"]].astype(np.float64) for m in micro_batches]
    values = np.concatenate([np.empty(0), *counted])
    return {
        "advantage_tokens": torch.tensor(len(values), dtype=torch.float64),
        "advantage_sum": torch.tensor(values.sum()),
        "advantage_square_sum": torch.tensor(np.square(values).sum()),
        "advantage_max": torch.tensor(values.max(initial=-np.inf)),
        "advantage_negative_max": torch.tensor((-values).max(initial=-np.inf)),
    }


def whiten(micro_batch: MicroBatch, sums: Mapping[str, float]) -> MicroBatch:
    """Compute (A - mean) / sqrt(variance + eps) with mean and biased variance over the global batch's loss tokens.

    Args:
        micro_batch: one of those that were counted.
        sums: `advantage_sums` of all ranks, reduced.
    Returns: the micro-batch; all its advantages are exactly 0 if those of the global batch are equal or none.
    Source: arXiv:2501.03262 (REINFORCE++), global advantage normalisation; eps under the root as in verl.
    """
    advantages, loss_mask = micro_batch.loss_arrays["advantages"], micro_batch.loss_arrays["loss_mask"]
    if not sums["advantage_tokens"] or sums["advantage_max"] == -sums["advantage_negative_max"]:
        return micro_batch.with_arrays(advantages=np.zeros_like(advantages))
    mean = sums["advantage_sum"] / sums["advantage_tokens"]
    variance = max(sums["advantage_square_sum"] / sums["advantage_tokens"] - mean**2, 0.0)
    whitened = (advantages.astype(np.float64) - mean) / (variance + VARIANCE_EPS) ** 0.5
    return micro_batch.with_arrays(advantages=np.where(loss_mask, whitened, 0.0).astype(np.float32))
