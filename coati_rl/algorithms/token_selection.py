"""Choose a share of a step's loss tokens, the same ones for every split into micro-batches and ranks.

Chosen by the policy's state before the step, so that the choice serves all updates of a batch. R rows, M loss tokens
per row; `reduce` adds up named numbers over all ranks, and returns none on ranks without the LM head.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coati_rl.algorithms.choices import TokenSelection
from coati_rl.batch import MicroBatch

Reduce = Callable[[dict[str, Tensor]], Mapping[str, float]]
Keys = NDArray[np.uint32]  # [N], in the order of what they stand for

_BITS, _BINS = 8, 256  # of a digit of a key


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectedTokens:
    """Mark tokens whose policy term differs: `left_out` ones have none, `held` ones another besides; see `PolicyLoss`.

    "top_entropy" leaves out all but the share of highest entropy: arXiv:2506.01939. "clip_cov" leaves out a share,
    drawn from the tokens with a covariance in the range; "kl_cov" holds the share of largest covariance:
    arXiv:2505.22617. The covariance of a token is (A - mean A) * (log pi_old - mean log pi_old), means over the
    step.
    """

    selection: TokenSelection
    fraction: float  # of the step's loss tokens; at least one is chosen
    covariance: tuple[float, float] = (1.0, 5.0)

    def __call__(self, micro_batches: Sequence[MicroBatch], reduce: Reduce) -> list[MicroBatch]:
        """Return the micro-batches of a rank with the marks; unchanged on ranks without the LM head."""
        if any(self.selection == "top_entropy" and "old_entropy" not in m.loss_arrays for m in micro_batches):
            return [*micro_batches]  # not scored here
        masks = [micro_batch.loss_arrays["loss_mask"] for micro_batch in micro_batches]
        sums = reduce(_totals(micro_batches))
        if not sums:
            return [*micro_batches]
        count = max(1, int(self.fraction * sums["num_tokens"]))
        if self.selection == "top_entropy":
            keys = [ordered_keys(m.loss_arrays["old_entropy"]) for m in micro_batches]
        else:
            values = [_covariances(micro_batch, sums) for micro_batch in micro_batches]
            keys = [ordered_keys(each) for each in values]
            if self.selection == "clip_cov":
                low, high = self.covariance
                masks = [m & (each > low) & (each < high) for m, each in zip(masks, values, strict=True)]
                keys = [_shuffled(micro_batch) for micro_batch in micro_batches]
        lowest = kth_largest([k[mask] for k, mask in zip(keys, masks, strict=True)], count, reduce)
        chosen = [(k >= lowest) & mask for k, mask in zip(keys, masks, strict=True)]
        return [
            micro_batch.with_arrays(**self._marks(part, micro_batch.loss_arrays["loss_mask"]))
            for micro_batch, part in zip(micro_batches, chosen, strict=True)
        ]

    def _marks(self, chosen: NDArray[np.bool_], loss_mask: NDArray[np.bool_]) -> dict[str, NDArray[np.bool_]]:
        if self.selection == "kl_cov":
            return {"held": chosen}
        return {"left_out": chosen if self.selection == "clip_cov" else loss_mask & ~chosen}


def ordered_keys(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Return uint32 keys of any shape that compare as the numbers do."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return np.where(bits >> 31 == 1, ~bits, bits | np.uint32(1 << 31))


def kth_largest(keys: Sequence[Keys], count: int, reduce: Reduce) -> np.uint32:
    """Return the `count`-th largest key of all ranks, digit by digit; 0 if there are not so many.

    Args:
        keys: of this rank.
        count: 1 for the largest.
        reduce: adds up over ranks.
    """
    own, found = np.concatenate([np.empty(0, np.uint32), *keys]), 0
    for shift in range(32 - _BITS, -1, -_BITS):
        digits = (own >> np.uint32(shift)) & np.uint32(_BINS - 1)
        histogram = np.bincount(digits, minlength=_BINS)
        totals = reduce({f"bin_{i:03d}": torch.tensor(float(n), dtype=torch.float64) for i, n in enumerate(histogram)})
        from_above = np.array([totals[f"bin_{i:03d}"] for i in range(_BINS)])[::-1].cumsum()
        place = int(np.searchsorted(from_above, count))
        if place == _BINS:
            return np.uint32(0)
        digit = _BINS - 1 - place
        count -= int(from_above[place - 1]) if place else 0
        own, found = own[digits == digit], (found << _BITS) | digit
    return np.uint32(found)


def _totals(micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """Return the number of loss tokens, and the sums of their advantages and old log-probabilities."""
    totals = dict.fromkeys(("num_tokens", "advantage_sum", "logprob_sum"), 0.0)
    for micro_batch in micro_batches:
        mask = micro_batch.loss_arrays["loss_mask"]
        totals["num_tokens"] += float(mask.sum())
        totals["advantage_sum"] += float(micro_batch.loss_arrays["advantages"][mask].sum(dtype=np.float64))
        totals["logprob_sum"] += float(_old_logprobs(micro_batch)[mask].sum(dtype=np.float64))
    return {name: torch.tensor(total, dtype=torch.float64) for name, total in totals.items()}


def _covariances(micro_batch: MicroBatch, sums: Mapping[str, float]) -> NDArray[np.float32]:
    """Return float32[R, M] of the tokens of a micro-batch, of any value on padding."""
    num_tokens = sums["num_tokens"] or 1.0
    advantages = micro_batch.loss_arrays["advantages"].astype(np.float64) - sums["advantage_sum"] / num_tokens
    logprobs = _old_logprobs(micro_batch).astype(np.float64) - sums["logprob_sum"] / num_tokens
    return (advantages * logprobs).astype(np.float32)


def _shuffled(micro_batch: MicroBatch) -> NDArray[np.uint32]:
    """Return uint32[R, M] keys in an order that looks random, of a token and its log-probability alone."""
    bits = np.ascontiguousarray(_old_logprobs(micro_batch), np.float32).view(np.uint32).astype(np.uint64)
    mixed = bits ^ (micro_batch.loss_arrays["token_ids"].astype(np.uint64) << np.uint64(32))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    keys: NDArray[np.uint32] = ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32)
    return keys


def _old_logprobs(micro_batch: MicroBatch) -> NDArray[np.float32]:
    arrays = micro_batch.loss_arrays
    found: NDArray[np.float32] = arrays.get("old_logprobs", arrays["rollout_logprobs"])
    return found
