"""Compare how likely a token, or a whole response, is now with how likely it was when it was sampled.

In: log-probabilities of a micro-batch. Out: log-ratios, of tokens or of samples. R rows, M loss tokens per row; a row
may hold several samples, which `sample_index` tells apart (-1 on padding).
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # nats; exp(20) = 4.9e8 keeps one astray token from turning the gradient of all into inf


def masked_log_ratio(logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """log pi(token) - log pi_old(token) where the mask is True, 0 elsewhere.

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
    """exp of a log-ratio, which is held at most at MAX_LOG_RATIO, where its gradient ends."""
    return torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))


def sample_mean(values: Tensor, loss_mask: Tensor, sample_index: Tensor) -> Tensor:
    """On every token of a sample, the mean of `values` over its loss tokens; 0 for samples without any.

    Args:
        values: float32[R, M], 0 where the mask is False; carries gradient.
        loss_mask: bool[R, M].
        sample_index: int[R, M], -1 on padding.
    Returns: float32[R, M], 0 where the mask is False.
    Source: of log-ratios, its exp is the length-normalised sequence ratio of arXiv:2507.18071 eq. 7.
    """
    samples, num_samples = _numbered(sample_index)
    # In float64, so that the order in which a GPU adds up does not show.
    sums = values.new_zeros(num_samples, dtype=torch.float64).index_add(0, samples, values.flatten().double())
    counts = torch.bincount(samples[loss_mask.flatten()], minlength=num_samples).clamp(min=1)
    means = (sums / counts)[samples].view_as(values).to(values.dtype)
    return torch.where(loss_mask, means, 0.0)


def sample_any(tokens: Tensor, sample_index: Tensor) -> Tensor:
    """bool[R, M]: on every token of a sample, whether any of its `tokens`, bool[R, M], is True."""
    samples, num_samples = _numbered(sample_index)
    return (torch.bincount(samples[tokens.flatten()], minlength=num_samples) > 0)[samples].view_as(tokens)


def count_samples(token_mask: Tensor, sample_index: Tensor) -> Tensor:
    """float64[]: samples of which the mask holds at least one token."""
    found, _ = torch.unique(sample_index[token_mask], return_inverse=True)
    return torch.tensor(len(found), dtype=torch.float64, device=token_mask.device)


def _numbered(sample_index: Tensor) -> tuple[Tensor, int]:
    """(int64[R * L] samples numbered from 0, padding among them; how many numbers there are)."""
    found, samples = torch.unique(sample_index.flatten(), return_inverse=True)
    return samples, len(found)
