"""Compute log-probability and entropy of chosen tokens from last hidden states, without storing their logits.

For any loss: both carry gradient, and the backward recomputes each chunk's logits from the hidden states. A loss that
is separable by token needs them only once, see `fused_loss`. R rows, L tokens per row, M loss tokens per row, H hidden
size, V vocabulary, N requested tokens.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from coati_rl.ops.head_gradients import HeadGradients, TokenGradients
from coati_rl.ops.vocab_chunks import ChosenTokens, LMHead, TokenChoice, choose_tokens, slices


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    sources: Tensor,
    token_mask: Tensor,
    temperature: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    chunk_elements: int | None = None,
    choice: TokenChoice | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute log softmax(z / temperature)[token] and that distribution's entropy, with z the logits at its source.

    Args:
        hidden: [R, L, H] after the final norm, float32 or bfloat16; carries gradient.
        weight: [V, H] of the LM head, same dtype; carries gradient.
        bias: [V] or None; carries gradient.
        token_ids: int64[R, M].
        sources: int64[R, M], the place in its row of the hidden state that predicts the token; it may predict several.
        token_mask: bool[R, M], True on the N requested tokens.
        temperature: float32[R, M], positive on requested tokens.
        group: ranks that share the vocabulary: rank r holds rows r * V / tp to (r + 1) * V / tp of weight and bias, and
            all hold the same of everything else. Forward and backward are collective over it; values and the
            gradient of `hidden` have the same bits on all its ranks. None: this process holds all rows.
        chunk_elements: bound on the logits that exist at a time; None: the device's.
        choice: see `choose_tokens`.
    Returns: (float32[R, M] log-probabilities in nats, entry [r, t] being that of token_ids[r, t];
        float32[R, M] entropies in nats); both carry gradient and are 0 where `token_mask` is False. Entropies that the
        loss does not use, or only detached, cost nothing in the backward.
    Raises: ValueError if shapes do not fit together or a requested token has no source in its row.
    """
    tokens = choose_tokens(hidden, token_ids, sources, token_mask, temperature, choice)
    logprobs, entropy = _ChosenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, 1), weight, bias, tokens, group, chunk_elements
    )
    return _spread(logprobs, tokens.places, token_mask), _spread(entropy, tokens.places, token_mask)


def _spread(values: Tensor, places: Tensor, like: Tensor) -> Tensor:
    """Scatter float32[N] to their places in float32[R, M], 0 elsewhere."""
    spread = torch.zeros(like.numel(), dtype=torch.float32, device=like.device)
    return spread.index_copy(0, places, values).view_as(like)


class _ChosenLogprobs(torch.autograd.Function):
    """Compute log-probability and entropy float32[N] of the chosen tokens from hidden [R * L, H]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: ChosenTokens,
        group: dist.ProcessGroup | None,
        chunk_elements: int | None,
    ) -> tuple[Tensor, Tensor]:
        num_tokens = len(tokens.places)
        head = LMHead(weight=weight, bias=bias, group=group)
        buffer = head.new_buffer(num_tokens, chunk_elements)
        logprobs, entropy, log_normaliser = torch.empty(
            (3, num_tokens), dtype=torch.float32, device=hidden.device
        ).unbind()
        for chunk in slices(num_tokens, len(buffer) or 1):
            logits = head.logits(hidden[tokens.sources[chunk]], tokens.temperature[chunk], buffer)
            softmax = head.softmax(logits, tokens.targets[chunk])
            logprobs[chunk], entropy[chunk] = softmax.logprobs, softmax.entropy
            log_normaliser[chunk] = softmax.log_normaliser
        ctx.save_for_backward(hidden, weight, bias, log_normaliser, entropy)
        ctx.tokens, ctx.group, ctx.chunk_elements = tokens, group, chunk_elements
        ctx.set_materialize_grads(False)  # zeros would mean a loss that uses entropies
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, log_normaliser, entropy = ctx.saved_tensors
        tokens: ChosenTokens = ctx.tokens
        num_tokens = len(tokens.places)
        head = LMHead(weight=weight, bias=bias, group=ctx.group)
        buffer = head.new_buffer(num_tokens, ctx.chunk_elements)
        gradients = HeadGradients(head, num_tokens, needs=ctx.needs_input_grad[:3])
        token_grads = TokenGradients.from_grads(grad_logprobs, grad_entropy, tokens.temperature)
        one = torch.ones((), device=hidden.device)
        for chunk in slices(num_tokens, len(buffer) or 1):
            chunk_hidden = hidden[tokens.sources[chunk]]
            logits = head.logits(chunk_hidden, tokens.temperature[chunk], buffer)
            probabilities = logits.sub_(log_normaliser[chunk, None]).exp_()
            gradients.add(
                chunk,
                chunk_hidden,
                probabilities,
                one,
                entropy[chunk],
                tokens.targets[chunk],
                token_grads.at(chunk),
            )
        return *gradients.of_inputs(hidden, tokens.sharing), None, None, None
