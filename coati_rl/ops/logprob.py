"""From a model's last hidden states to the log-probability and entropy of chosen tokens, without their logits.

Letters: R rows, L tokens per row, H hidden size, V vocabulary, N tokens that are asked for, C tokens of a chunk.

Only the N chosen tokens pass through the LM head, C at a time, so that at most float32[C, V] logits exist. The
backward computes each chunk's logits again from the hidden states instead of keeping them: at V = 151,936 they would
be the largest tensor of the whole training step.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 2**24  # logits of a chunk, C * V: 64 MiB in float32


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    token_mask: Tensor,
    temperature: Tensor,
    *,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """log softmax(z / temperature)[token] and the entropy of that distribution, with z the logits one place before.

    Args:
        hidden: [R, L, H] after the final norm, float32 or bfloat16; carries gradient.
        weight: [V, H] of the LM head, same dtype; carries gradient.
        bias: [V] or None; carries gradient.
        token_ids: int64[R, L].
        token_mask: bool[R, L], True on the N tokens that are asked for. The first of a row has nothing before it.
        temperature: float32[R, L], positive where asked for.
        chunk_elements: bound on C * V.
    Returns: (float32[R, L] log-probabilities in nats, entry [r, t] being that of token_ids[r, t];
        float32[R, L] entropies in nats, without gradient); both 0 where `token_mask` is False.
    Raises: ValueError if shapes do not fit together or the first token of a row is asked for.
    """
    if not token_ids.shape == token_mask.shape == temperature.shape == hidden.shape[:2]:
        shapes = [tuple(t.shape) for t in (token_ids, token_mask, temperature, hidden)]
        raise ValueError(f"token_ids, token_mask, temperature and hidden must agree on [R, L], not {shapes}")
    if token_mask[:, :1].any():
        raise ValueError("token_mask is True on the first token of a row: it has no log-probability")
    chosen = token_mask.flatten().nonzero().squeeze(-1)  # int64[N], of R * L
    chunk_size = max(1, chunk_elements // weight.shape[0])
    logprobs, entropy = _ChosenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, 1),
        weight,
        bias,
        chosen - 1,
        token_ids.flatten()[chosen],
        temperature.flatten()[chosen],
        chunk_size,
    )
    return _spread(logprobs, chosen, token_mask), _spread(entropy, chosen, token_mask)


def _spread(values: Tensor, chosen: Tensor, like: Tensor) -> Tensor:
    """float32[N] back to their places in float32[R, L], 0 elsewhere."""
    spread = torch.zeros(like.numel(), dtype=torch.float32, device=like.device)
    return spread.index_copy(0, chosen, values).view_as(like)


class _ChosenLogprobs(torch.autograd.Function):
    """Log-probability and entropy float32[N] of targets int64[N], from rows `source` of hidden [R * L, H]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        source: Tensor,
        targets: Tensor,
        temperature: Tensor,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, log_normaliser = torch.empty(
            (3, len(source)), dtype=torch.float32, device=hidden.device
        ).unbind()
        for chunk in _chunks(len(source), chunk_size):
            logits = _scaled_logits(hidden[source[chunk]], weight, bias, temperature[chunk])
            peak = logits.amax(dim=-1, keepdim=True)
            shifted = logits.sub_(peak)  # float32[C, V]; in place, the largest tensors here are not copied
            of_target = shifted.gather(-1, targets[chunk, None]).squeeze(-1)
            exponentials = shifted.exp()
            total = exponentials.sum(dim=-1)
            log_total = total.log()
            logprobs[chunk] = of_target - log_total
            # -sum p log p with log p = shifted - log_total
            entropy[chunk] = log_total - exponentials.mul_(shifted).sum(dim=-1) / total
            log_normaliser[chunk] = peak.squeeze(-1) + log_total
        ctx.save_for_backward(hidden, weight, bias, source, targets, temperature, log_normaliser)
        ctx.chunk_size = chunk_size
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, source, targets, temperature, log_normaliser = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        # Chunks add up in float32 also under bfloat16: hundreds of them would drown each other in 8 bits.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        slope = grads[0].float() / temperature  # float32[N], d loss / d (z of the target), without the softmax part
        for chunk in _chunks(len(source), ctx.chunk_size):
            chunk_hidden = hidden[source[chunk]]
            logits = _scaled_logits(chunk_hidden, weight, bias, temperature[chunk])
            # d logprob / dz = (one_hot(target) - softmax) / temperature
            grad_logits = logits.sub_(log_normaliser[chunk, None]).exp_().mul_(-slope[chunk, None])
            grad_logits.scatter_add_(-1, targets[chunk, None], slope[chunk, None])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(dim=0)
            grad_logits = grad_logits.to(weight.dtype)
            if grad_hidden is not None:
                # Sources are unique, so a copy does; adding would be atomic, hence out of order, on a GPU.
                grad_hidden.index_copy_(0, source[chunk], grad_logits @ weight)
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.T, chunk_hidden)
        return grad_hidden, _cast(grad_weight, weight), _cast(grad_bias, bias), None, None, None, None


def _chunks(num_tokens: int, chunk_size: int) -> Iterator[slice]:
    for start in range(0, num_tokens, chunk_size):
        yield slice(start, min(start + chunk_size, num_tokens))


def _scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor) -> Tensor:
    """float32[C, V]: logits in the model's dtype, as inference engines compute them, then divided in float32."""
    logits = F.linear(hidden, weight, bias).float()
    return logits.div_(temperature[:, None])


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in float32."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total += left @ right


def _cast(grad: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.to(cast(Tensor, like).dtype)
