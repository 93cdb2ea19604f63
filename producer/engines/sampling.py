"""Sample tokens from logits and compute their log-probabilities by the same definition as vLLM.

In: float32[B, V] logits and each row's settings. Out: log-probabilities of the processed distribution, and draws from
it. B rows (samples being decoded), V vocabulary.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from coati_rl.types import SamplingParams


def processed_logprobs(logits: Tensor, settings: Sequence[SamplingParams]) -> Tensor:
    """Compute log-softmax after temperature, min-p, top-k and top-p, float32[B, V], with -inf for excluded tokens.

    A greedy row (temperature 0) keeps the model's logits, as in vLLM.
    """
    device = logits.device
    temperature = torch.tensor([row.temperature or 1.0 for row in settings], device=device)  # float32[B]
    logits = logits.float() / temperature[:, None]
    vocab_size = logits.shape[-1]
    least = [row.min_p if row.temperature > 0 else 0.0 for row in settings]
    if any(least):
        logits = _cut_min_p(logits, torch.tensor(least, device=device))
    filtered = [row.temperature > 0 and (row.top_k is not None or row.top_p < 1.0) for row in settings]
    if any(filtered):
        top_k = [min(row.top_k or vocab_size, vocab_size) for row in settings]
        top_p = [row.top_p for row in settings]
        mask = torch.tensor(filtered, device=device)
        cut = _cut(logits, torch.tensor(top_k, device=device), torch.tensor(top_p, device=device))
        logits = torch.where(mask[:, None], cut, logits)
    return logits.log_softmax(dim=-1)


def draw(logprobs: Tensor, settings: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    """Sample one token per row, int64[B]: the most likely one if greedy, else the inverse CDF at a uniform number.

    Each row's numbers come from its own generator, so that its tokens do not depend on other rows of the batch.
    """
    probabilities = logprobs.double().exp()
    cumulative = probabilities.cumsum(dim=-1)  # float64: float32 loses the tail of a large vocabulary
    targets = torch.tensor(list(uniforms), dtype=torch.float64, device=logprobs.device) * cumulative[:, -1]
    sampled = torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0]
    # Rounding may land on a token of probability 0 after the last possible one.
    last = probabilities.shape[-1] - 1 - (probabilities > 0).flip(-1).int().argmax(dim=-1)
    sampled = torch.minimum(sampled, last)
    greedy = torch.tensor([row.temperature == 0.0 for row in settings], device=logprobs.device)
    return torch.where(greedy, logprobs.argmax(dim=-1), sampled)


def penalised(logits: Tensor, settings: Sequence[SamplingParams], contexts: Iterable[Sequence[int]]) -> Tensor:
    """Return float32[B, V] logits with each row's repetition penalty on the tokens of its context.

    A positive logit is divided by the penalty, a negative one multiplied, once however often the token came before.
    Source: arXiv:1909.05858 sec. 4.1, and for negative logits vLLM and transformers.
    """
    if all(row.repetition_penalty == 1.0 for row in settings):
        return logits
    logits = logits.clone()
    for row, each, context in zip(logits, settings, contexts, strict=True):
        if each.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(context)), device=logits.device)
            own = row[seen]
            row[seen] = torch.where(own > 0, own / each.repetition_penalty, own * each.repetition_penalty)
    return logits


def _cut_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Set logits to -inf where the probability is below min_p float32[B] times the likeliest token's."""
    probabilities = logits.softmax(dim=-1)
    least = probabilities.amax(dim=-1, keepdim=True) * min_p[:, None]
    return logits.masked_fill(probabilities < least, -torch.inf)


def _cut(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set logits to -inf outside of the top k (ties with the k-th are kept), then outside of the top-p mass."""
    ordered, indices = logits.sort(dim=-1, descending=True)
    smallest = ordered.gather(-1, (top_k - 1)[:, None])
    ordered = ordered.masked_fill(ordered < smallest, -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    beyond = mass_before >= top_p[:, None]
    beyond[:, 0] = False
    ordered = ordered.masked_fill(beyond & (top_p < 1.0)[:, None], -torch.inf)
    return torch.empty_like(logits).scatter_(-1, indices, ordered)
