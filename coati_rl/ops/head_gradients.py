"""Accumulate gradients of the LM head, and of the hidden states before it, over chunks of tokens.

Letters are those of `vocab_chunks`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from coati_rl.ops.cpu_products import add_product, product
from coati_rl.ops.vocab_chunks import LMHead, SharedSources, row_blocks, sum_rows


class TokenGradients(NamedTuple):
    """Hold the loss's gradients of log-probabilities and entropies, divided by temperature as the logits are."""

    logprob: Tensor  # float32[N], d loss / d logprob / temperature
    entropy: Tensor | None  # float32[N], d loss / d entropy / temperature; None: the loss does not use entropies

    @classmethod
    def from_grads(cls, logprob: Tensor | None, entropy: Tensor | None, temperature: Tensor) -> "TokenGradients":
        """Divide float32[N] gradients by temperature; None where autograd has none."""
        return cls(
            torch.zeros_like(temperature) if logprob is None else logprob / temperature,
            None if entropy is None else entropy / temperature,
        )

    def at(self, chunk: slice) -> "TokenGradients":
        """Return float32[C] of a chunk of the N tokens."""
        return TokenGradients(self.logprob[chunk], None if self.entropy is None else self.entropy[chunk])


class HeadGradients:
    """Accumulate gradients of the chosen hidden states and of the LM head over chunks.

    Chunks add up in float32 also under bfloat16: a sum of hundreds of terms would lose small ones in 8 bits.
    """

    def __init__(self, head: LMHead, num_tokens: int, *, needs: Sequence[bool]) -> None:
        """Start at zero; `needs` tells which of (hidden, weight, bias) carry gradient."""
        self.head = head
        weight, bias = head.weight, head.bias
        needs_hidden, needs_weight, needs_bias = needs
        # Ranks sum theirs in float32, for the same reason.
        dtype = weight.dtype if head.group is None else torch.float32
        self.rows = weight.new_empty((num_tokens, weight.shape[1]), dtype=dtype) if needs_hidden else None
        # The first chunk fills it, so that no zeros are written and read again.
        make = torch.empty_like if num_tokens else torch.zeros_like
        self.weight = make(weight, dtype=torch.float32) if needs_weight else None
        self._is_filled = False
        self.bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs_bias else None

    @classmethod
    def if_needed(cls, head: LMHead, num_tokens: int, inputs: Sequence[Tensor | None]) -> "HeadGradients | None":
        """Start at zero; None if gradients are disabled, or none of `inputs` (hidden, weight, bias) carries one."""
        needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in inputs]
        return cls(head, num_tokens, needs=needs) if any(needs) else None

    def add(
        self,
        chunk: slice,
        hidden: Tensor,
        exponentials: Tensor,
        total: Tensor,
        entropy: Tensor,
        targets: Tensor,
        token_grads: TokenGradients,
    ) -> None:
        """Add the gradients of the tokens `chunk` of the N; overwrites the exponentials.

        Args:
            chunk: which of the N.
            hidden: [C, H], that predicted them.
            exponentials: float32[C, V], of which softmax = exponentials / total.
            total: float32[C], or float32[] if it is the same for all.
            entropy: float32[C], nats.
            targets: int64[C], token ids.
            token_grads: of these C.
        """
        # With p = softmax: d logprob / dz = one_hot(target) - p, d entropy / dz = -p (log p + entropy).
        grad_logits = _without_targets(exponentials, total, entropy, token_grads)
        self.add_logits(chunk, hidden, self.head.add_to_targets(grad_logits, targets, token_grads.logprob))

    def add_logits(self, chunk: slice, hidden: Tensor, grad_logits: Tensor) -> None:
        """Add the gradients that follow from float32[C, V] gradients of the logits before division by temperature."""
        weight = self.head.weight
        if self.bias is not None:
            self.bias += grad_logits.sum(dim=0)
        grad_logits = grad_logits.to(weight.dtype)
        if self.rows is not None:
            self.rows[chunk] = product(grad_logits, weight)
        if self.weight is not None:
            add_product(self.weight, grad_logits.T, hidden, fills=not self._is_filled)
            self._is_filled = True

    def of_inputs(self, hidden: Tensor, sharing: SharedSources) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return gradients of (hidden [R * L, H], weight, bias), the latter two float32 and of this rank's rows.

        Autograd casts them to the parameter's dtype, or its `grad_dtype`. Collective over the group.
        """
        grad_hidden = None
        if self.rows is not None:
            if self.head.group is not None:
                dist.all_reduce(self.rows, dist.ReduceOp.SUM, self.head.group)
            # Tokens that one hidden state predicts, as the first ones after a shared prompt, add up.
            grad_hidden = sum_rows(self.rows, sharing, length=len(hidden)).to(hidden.dtype)
        return grad_hidden, self.weight, self.bias


def _without_targets(exponentials: Tensor, total: Tensor, entropy: Tensor, token_grads: TokenGradients) -> Tensor:
    """Compute float32[C, V] gradients of the logits without the one_hot(target), in the exponentials' memory."""
    if token_grads.entropy is None:
        return exponentials.mul_((-token_grads.logprob / total)[:, None])
    # With p = x / total: -p (log p + entropy) = (entr x - x (entropy - log total)) / total, where entr x = -x log x.
    of_exponential = (token_grads.entropy * (total.log() - entropy) - token_grads.logprob) / total
    of_entr = token_grads.entropy / total
    for block in row_blocks(exponentials):
        rows = exponentials[block]
        entr = torch.special.entr(rows)  # 0 where x has underflown to 0, not 0 * -inf
        rows.mul_(of_exponential[block, None]).addcmul_(entr, of_entr[block, None])
    return exponentials
