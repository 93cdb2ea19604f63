"""Compute the KL divergence between a teacher and a policy over the whole vocabulary, with its gradient, in chunks.

Of the teacher only the last hidden states are stored; the logits of both models exist for a chunk of tokens at a time.
R rows, L tokens per row, M loss tokens per row, H hidden size of the policy, G of the teacher, V vocabulary, N tokens
that the loss counts, C tokens of a chunk.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from coati_rl.ops.distilled_loss import Direction
from coati_rl.ops.fused_loss import StoredGradients
from coati_rl.ops.head_gradients import HeadGradients
from coati_rl.ops.vocab_chunks import ChosenTokens, LMHead, TokenChoice, choose_tokens, slices


def vocabulary_kl_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arrays: Mapping[str, Tensor],
    *,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    direction: Direction,
    group: dist.ProcessGroup | None = None,
    chunk_elements: int | None = None,
    choice: TokenChoice | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute sum_t w_t * KL_t with p = softmax(z / temperature) of the policy and q of the teacher.

    "reverse" is KL_t = sum_v p (log p - log q), "forward" is sum_v q (log q - log p). A backward through the result is
    possible once.

    Args:
        hidden: [R, L, H] after the final norm, float32 or bfloat16; carries gradient.
        weight: [V, H] of the LM head, same dtype; carries gradient. With a group [V / tp, H].
        bias: [V] or None; carries gradient.
        arrays: the micro-batch's loss arrays by name, each [R, M]: `token_ids`, `sources`, `loss_mask`, `temperature`,
            and `loss_weights`, w.
        teacher_hidden: [R, M, G], the teacher's hidden states that predict the tokens.
        teacher_weight: [V, G] of its LM head; with a group [V / tp, G].
        teacher_bias: [V] or None.
        direction: of the divergence.
        group: ranks that share both vocabularies, as in `token_logprobs`. The call is collective over it, the backward
            is not; loss, sums and the gradient of `hidden` have the same bits on all its ranks.
        chunk_elements: bound on the logits of each model that exist at a time; None: the device's.
        choice: see `choose_tokens`.
    Returns: (float32[] summed loss, {"teacher_kl_sum": float64[], unweighted, nats; "loss_sum": float64[], the loss}).
    Raises: ValueError if shapes do not fit together, or a token that the loss counts has no source in its row.
    Source: arXiv:2306.13649 (GKD) sec. 3, without its gradient through sampling; the forward KL is arXiv:1503.02531.
    """
    _check_shapes(weight, arrays["token_ids"], teacher_hidden, teacher_weight)
    tokens = choose_tokens(
        hidden, arrays["token_ids"], arrays["sources"], arrays["loss_mask"], arrays["temperature"], choice
    )
    weights = arrays["loss_weights"].flatten()[tokens.places]  # float32[N]
    of_teacher = teacher_hidden.flatten(0, 1)[tokens.places].to(teacher_weight.dtype)  # [N, G]
    flat_hidden = hidden.flatten(0, 1)
    inputs = (flat_hidden, weight, bias)
    head = LMHead(weight=weight, bias=bias, group=group)
    teacher = LMHead(weight=teacher_weight, bias=teacher_bias, group=group)
    gradients = HeadGradients.if_needed(head, len(tokens.places), inputs)
    with torch.no_grad():
        kl = _divergences(flat_hidden, head, of_teacher, teacher, tokens, weights, direction, gradients, chunk_elements)
        loss = (weights * kl).sum()
        sums = {"teacher_kl_sum": kl.double().sum(), "loss_sum": loss.double()}
        if gradients is None:
            return loss, sums
        stored = gradients.of_inputs(flat_hidden, tokens.sharing)
    return StoredGradients.apply(*inputs, loss, stored), sums  # type: ignore[no-untyped-call]


def _divergences(
    hidden: Tensor,
    head: LMHead,
    of_teacher: Tensor,
    teacher: LMHead,
    tokens: ChosenTokens,
    weights: Tensor,
    direction: Direction,
    gradients: HeadGradients | None,
    chunk_elements: int | None,
) -> Tensor:
    """Return float32[N] KL of each token, chunk by chunk, and add the chunks' gradients to `gradients`."""
    num_tokens = len(tokens.places)
    kl = torch.zeros(num_tokens, dtype=torch.float32, device=hidden.device)
    buffer, its_buffer = (each.new_buffer(num_tokens, chunk_elements) for each in (head, teacher))
    for chunk in slices(num_tokens, len(buffer) or 1):
        temperature, chunk_hidden = tokens.temperature[chunk], hidden[tokens.sources[chunk]]
        logprobs = head.log_softmax(head.logits(chunk_hidden, temperature, buffer))
        its_logprobs = teacher.log_softmax(teacher.logits(of_teacher[chunk], temperature, its_buffer))
        kl[chunk], grad_logits = _divergence(logprobs, its_logprobs, head, direction)
        if gradients is not None:
            grad_logits.mul_((weights[chunk] / temperature)[:, None])
            gradients.add_logits(chunk, chunk_hidden, grad_logits)
    return kl


def _check_shapes(weight: Tensor, token_ids: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> None:
    if teacher_weight.shape[0] != weight.shape[0]:
        raise ValueError(f"the teacher has logits for {teacher_weight.shape[0]} tokens, the policy {weight.shape[0]}")
    if teacher_hidden.shape[:2] != token_ids.shape:
        raise ValueError(f"teacher_hidden is {tuple(teacher_hidden.shape)}, of tokens {tuple(token_ids.shape)}")


def _divergence(logprobs: Tensor, its_logprobs: Tensor, head: LMHead, direction: Direction) -> tuple[Tensor, Tensor]:
    """Return float32[C] divergences, and float32[C, V] their gradients of the policy's logits over temperature.

    Overwrites both float32[C, V] arguments. Collective over the head's group.
    """
    if direction == "reverse":
        difference = torch.sub(logprobs, its_logprobs, out=its_logprobs)
        probabilities = logprobs.exp_()
        kl = head.reduced(torch.linalg.vecdot(probabilities, difference))
        return kl, difference.sub_(kl[:, None]).mul_(probabilities)
    difference = its_logprobs - logprobs
    its_probabilities = its_logprobs.exp_()
    kl = head.reduced(torch.linalg.vecdot(its_probabilities, difference))
    return kl, logprobs.exp_().sub_(its_probabilities)
