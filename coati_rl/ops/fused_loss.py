"""Evaluate a loss that is separable by token chunk by chunk, together with its gradient.

The logits of a chunk are used for its log-probabilities and entropies, then for its gradient, and are freed: unlike in
`logprob`, the backward does not compute them again, but the gradients of hidden states and LM head are stored until
the backward. R rows, L tokens per row, M loss tokens per row, H hidden size, V vocabulary, N tokens that the loss
counts, C tokens of a chunk.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from coati_rl.algorithms.sums import merge_sums
from coati_rl.ops.head_gradients import HeadGradients, TokenGradients
from coati_rl.ops.vocab_chunks import ChosenTokens, LMHead, TokenChoice, choose_tokens, slices

if TYPE_CHECKING:
    from coati_rl.protocols import LossFn


def fused_token_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arrays: Mapping[str, Tensor],
    loss_fn: "LossFn",
    *,
    group: dist.ProcessGroup | None = None,
    chunk_elements: int | None = None,
    choice: TokenChoice | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute loss_fn(token_logprobs(...), arrays) with logits computed once for forward and backward.

    Only tokens whose `loss_mask` is True reach the loss, as arrays of shape [1, C], and without `sample_index`, since a
    chunk holds parts of samples; if there are none, one masked token does, so that there is a report. Log-probabilities
    and entropies both carry gradient; entropies that the loss does not use, or only detached, cost nothing. A backward
    through the result is possible once.

    Args:
        hidden: [R, L, H] after the final norm, float32 or bfloat16; carries gradient.
        weight: [V, H] of the LM head, same dtype; carries gradient. With a group [V / tp, H].
        bias: [V] or None; carries gradient.
        arrays: the micro-batch's loss arrays by name, each [R, M], among them `token_ids`, `sources`, `loss_mask` and
            `temperature`; and others of shape [], which are passed to the loss unchanged.
        loss_fn: with a true `is_token_separable`.
        group: ranks that share the vocabulary, as in `token_logprobs`. The call is collective over it, the backward
            is not; loss, sums and the gradient of `hidden` have the same bits on all its ranks.
        chunk_elements: bound on the logits that exist at a time; None: the device's.
        choice: see `choose_tokens`.
    Returns: (float32[] summed loss, the sums that the loss reports, detached).
    Raises: ValueError if the loss is not separable by token, shapes do not fit together, or a token that the loss
        counts has no source in its row.
    """
    if not loss_fn.is_token_separable:
        raise ValueError(f"{type(loss_fn).__name__} is not separable by token: use token_logprobs")
    shape = arrays["token_ids"].shape
    arrays = {name: array for name, array in arrays.items() if name != "sample_index"}
    misfits = [name for name, array in arrays.items() if array.dim() > 0 and array.shape != shape]
    if misfits:
        raise ValueError(f"{', '.join(misfits)} must have the shape of token_ids, {tuple(shape)}")
    tokens = choose_tokens(
        hidden, arrays["token_ids"], arrays["sources"], arrays["loss_mask"], arrays["temperature"], choice
    )
    flat_hidden = hidden.flatten(0, 1)
    inputs = (flat_hidden, weight, bias)
    head = LMHead(weight=weight, bias=bias, group=group)
    gradients = HeadGradients.if_needed(head, len(tokens.places), inputs)
    with torch.no_grad():
        loss, sums = _evaluate(flat_hidden, head, tokens, arrays, loss_fn, gradients, chunk_elements)
        if gradients is None:
            return loss, sums
        stored = gradients.of_inputs(flat_hidden, tokens.sharing)
    return StoredGradients.apply(*inputs, loss, stored), sums  # type: ignore[no-untyped-call]


def _evaluate(
    hidden: Tensor,
    head: LMHead,
    tokens: ChosenTokens,
    arrays: Mapping[str, Tensor],
    loss_fn: "LossFn",
    gradients: HeadGradients | None,
    chunk_elements: int | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute loss and sums over all chunks, and add the chunks' gradients to `gradients`."""
    num_tokens = len(tokens.places)
    if num_tokens == 0:  # use one masked token: losses cannot take a maximum over none
        unused = torch.zeros(1, dtype=torch.float32, device=hidden.device)
        return _token_terms(loss_fn, unused, unused, _pick(arrays, tokens.places.new_zeros(1)))[:2]
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    sums: dict[str, Tensor] = {}
    buffer = head.new_buffer(num_tokens, chunk_elements)
    for chunk in slices(num_tokens, len(buffer)):
        chunk_hidden, targets = hidden[tokens.sources[chunk]], tokens.targets[chunk]
        softmax = head.softmax(head.logits(chunk_hidden, tokens.temperature[chunk], buffer), targets)
        chosen = _pick(arrays, tokens.places[chunk])
        chunk_loss, chunk_sums, grads = _token_terms(loss_fn, softmax.logprobs, softmax.entropy, chosen)
        loss += chunk_loss
        sums = merge_sums(sums, chunk_sums)
        if gradients is not None:
            token_grads = TokenGradients.from_grads(*grads, tokens.temperature[chunk])
            gradients.add(
                chunk, chunk_hidden, softmax.exponentials, softmax.total, softmax.entropy, targets, token_grads
            )
    return loss, sums


def _pick(arrays: Mapping[str, Tensor], places: Tensor) -> dict[str, Tensor]:
    """Gather [R, M] arrays at `places`, int64[C], as [1, C]; arrays of shape [] are unchanged."""
    return {name: t if t.dim() == 0 else t.flatten()[places][None] for name, t in arrays.items()}


def _token_terms(
    loss_fn: "LossFn", logprobs: Tensor, entropy: Tensor, arrays: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor], tuple[Tensor | None, Tensor | None]]:
    """Return float32[] loss of these tokens, its sums, float32[C] gradients of logprobs and entropy (None: unused)."""
    with torch.enable_grad():
        leaves = logprobs.detach().requires_grad_(), entropy.detach().requires_grad_()
        loss, sums = loss_fn(leaves[0][None], leaves[1][None], arrays)
        grad_logprobs, grad_entropy = torch.autograd.grad(loss, leaves, allow_unused=True)
    return loss.detach(), {name: value.detach() for name, value in sums.items()}, (grad_logprobs, grad_entropy)


class StoredGradients(torch.autograd.Function):
    """Attach precomputed gradients of hidden, weight and bias to the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss: Tensor,
        gradients: tuple[Tensor | None, ...],
    ) -> Tensor:
        """Return the loss, and keep the gradients."""
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients times the loss's."""
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("a second backward through fused_token_loss: the first has freed its gradients")
        # In place: a copy of the LM head's gradient would be as large as the LM head in float32.
        return *(None if gradient is None else gradient.mul_(grad_loss) for gradient in gradients), None, None
