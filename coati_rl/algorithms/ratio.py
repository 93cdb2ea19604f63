"""Compute probability ratios of tokens and samples between the current policy and the one that sampled them.

R rows, M loss tokens per row; a row may hold several samples, which `sample_index` numbers (-1 on padding).
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # nats; exp(20) = 4.9e8: one extreme token must not turn all gradients into inf


def masked_log_ratio(logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Compute log pi(token) - log pi_old(token) where the mask is True, 0 elsewhere.

    Masked here and not after exp: padding may hold -inf, and 0 * inf is a NaN gradient.

    Args:
        logprobs: float32[R, M], nats; carries gradient.
        old_logprobs: float32[R, M], nats.
        loss_mask: bool[R, M].
    Returns: float32[R, M], nats.
    Raises: ValueError if shapes differ.
    """
    if not logprobs.shape == old_logprobs.shape == loss_mask.shape:
        shapes = [tuple(t.shape) for t in (logprobs, old_logprobs, loss_mask)]
        raise ValueError(f"log-probabilities and mask must have one shape, not {shapes}")
    return torch.where(loss_mask, logprobs - old_logprobs, 0.0)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Compute exp of a log-ratio, clamped at MAX_LOG_RATIO, beyond which it has no gradient."""
    return torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))


def sample_mean(values: Tensor, loss_mask: Tensor, sample_index: Tensor) -> Tensor:
    """Compute on every token of a sample the mean of `values` over its loss tokens; 0 for samples without any.

    Args:
        values: float32[R, M], 0 where the mask is False; carries gradient.
        loss_mask: bool[R, M].
        sample_index: int[R, M], -1 on padding.
    Returns: float32[R, M], 0 where the mask is False.
    Source: of log-ratios, its exp is the length-normalised sequence ratio of arXiv:2507.18071 eq. 7.
    """
    samples, num_samples = _numbered(sample_index)
    counts = torch.bincount(samples[loss_mask.flatten()], minlength=num_samples).clamp(min=1)
    means = (_sums(values, samples, num_samples) / counts)[samples].view_as(values).to(values.dtype)
    return torch.where(loss_mask, means, 0.0)


def sample_sum(values: Tensor, loss_mask: Tensor, sample_index: Tensor) -> Tensor:
    """Compute on every token of a sample the sum of `values` over its loss tokens; as `sample_mean` otherwise."""
    samples, num_samples = _numbered(sample_index)
    sums = _sums(values, samples, num_samples)[samples].view_as(values).to(values.dtype)
    return torch.where(loss_mask, sums, 0.0)


def sample_any(tokens: Tensor, sample_index: Tensor) -> Tensor:
    """Return bool[R, M]: on every token of a sample, whether any of its `tokens`, bool[R, M], is True."""
    samples, num_samples = _numbered(sample_index)
    return (torch.bincount(samples[tokens.flatten()], minlength=num_samples) > 0)[samples].view_as(tokens)


def count_samples(token_mask: Tensor, sample_index: Tensor) -> Tensor:
    """Return float64[], the number of samples with at least one token in the mask."""
    found, _ = torch.unique(sample_index[token_mask], return_inverse=True)
    return torch.tensor(len(found), dtype=torch.float64, device=token_mask.device)


def _sums(values: Tensor, samples: Tensor, num_samples: int) -> Tensor:
    """Return float64[N], in which the order of additions on a GPU has no effect on a float32 result."""
    return values.new_zeros(num_samples, dtype=torch.float64).index_add(0, samples, values.flatten().double())


def _numbered(sample_index: Tensor) -> tuple[Tensor, int]:
    """Return int64[R * M] samples numbered from 0, with padding as one of them, and the count of numbers."""
    found, samples = torch.unique(sample_index.flatten(), return_inverse=True)
    return samples, len(found)
