"""Load a Hugging Face causal language model and run its forward from a micro-batch up to the loss.

The input is a `MicroBatch`; the output is log-probabilities, or the summed loss and its reported sums. With a scalar
head (`scalar_head`) values take the place of log-probabilities. Head and loss are computed inside the model's forward,
since the last pipeline stage needs them there. R rows, L tokens per row, M loss tokens per row, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from coati_rl.algorithms.sums import merge_sums
from coati_rl.batch import MicroBatch
from coati_rl.errors import ConfigError
from coati_rl.model_files.config import read_config
from coati_rl.ops.distilled_loss import DistilledLoss
from coati_rl.ops.fused_loss import fused_token_loss
from coati_rl.ops.host_copies import on_device
from coati_rl.ops.logprob import token_logprobs
from coati_rl.ops.vocab_chunks import TokenChoice, token_choice
from coati_rl.ops.vocabulary_kl import vocabulary_kl_loss
from consumer.models import packed_attention
from consumer.models.context_cut import cut_context
from consumer.models.context_part import ContextPart, ContextRank
from consumer.models.grouped_attention import SequenceGroups
from consumer.models.lm_head import head_weight
from consumer.models.loading import prepare, read_model
from consumer.models.packed_attention import RowLengths, RowParents, row_lengths, row_parents
from consumer.models.routers import Routing
from consumer.models.scalar_head import scalar_head, scalar_values

if TYPE_CHECKING:
    from coati_rl.protocols import LossFn

Precision = Literal["fp32", "bf16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


# Log-probabilities, or a scalar head's values; entropies; the hidden states that predict the loss tokens.
Output = Literal["scores", "entropy", "hidden"]

Result = tuple[Tensor, dict[str, Tensor]]


class HeadWeights(NamedTuple):
    """Hold an LM head's weights, or this tensor-parallel rank's rows of them."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyInput:
    """Hold the inputs of one forward. Not a tensor or a known container, so wrappers do not cast or move it."""

    token_ids: Tensor  # int64[R, L]
    position_ids: Tensor  # int64[R, L]
    lengths: RowLengths | None = None  # of the segments in each row; None if no row holds more than one
    parents: RowParents | None = None  # of the segments in each row; None if none has one
    # By name, each [R, M] or [R, M, ...]; and trainer_version, int64[].
    loss_arrays: dict[str, Tensor] = field(default_factory=dict)
    choice: TokenChoice | None = None  # of the tokens that the loss counts; None: made by the loss
    loss_fn: "LossFn | None" = None  # None: log-probabilities only
    output: Output = "scores"  # without a loss
    teacher_head: HeadWeights | None = None  # on ranks with an LM head, for a `DistilledLoss`
    groups: SequenceGroups | None = None  # of the only row's sequences, in place of `lengths`
    # Computes what the forward returns from the last hidden states [R, L, H] in place of a loss; see `loss_of_hidden`.
    after_hidden: Callable[[PreTrainedModel, Tensor, dist.ProcessGroup | None], Result] | None = None
    routing: Routing | None = None  # for the routers of a mixture of experts; None: nothing is observed
    # Of a context-parallel rank: all tensors above are those of its own tokens, and lengths and parents None.
    context: ContextPart | None = None


def make_input(
    micro_batch: MicroBatch,
    *,
    device: torch.device,
    trainer_version: int = -1,
    loss_fn: "LossFn | None" = None,
    output: Output = "scores",
    teacher_head: HeadWeights | None = None,
    routing: Routing | None = None,
    context: ContextRank | None = None,
) -> PolicyInput:
    """Copy a micro-batch's arrays to the device, of a context-parallel rank those of its tokens.

    The other arguments are those of `PolicyInput`. The host waits for no copy, and a forward and backward of the result
    for no kernel.

    Raises: ValueError if the temperature of a loss token is not positive, or its source is not in its row.
    """

    def copied(array: np.ndarray) -> Tensor:
        # torch.tensor copies: arrays that come out of Ray's object store are read-only.
        return on_device(torch.tensor(array), device)

    version = {"trainer_version": torch.full((), trainer_version, device=device)}
    part = None
    if context is not None:
        cut = cut_context(micro_batch, context.size)
        whole = {name: copied(each) for name, each in micro_batch.loss_arrays.items() if each.ndim == 2} | version
        part = ContextPart.of(cut, context, whole, device)
        micro_batch = cut.local_batch(micro_batch, context.rank)
    arrays = micro_batch.loss_arrays
    # In NumPy: a check on the device, or a choice of tokens, would wait for it in every forward.
    if not (arrays["temperature"][arrays["loss_mask"]] > 0).all():
        raise ValueError("temperature must be positive on every token that the loss counts")
    lengths = row_lengths(micro_batch.segments, micro_batch.token_ids.shape)
    choice = token_choice(arrays["loss_mask"], arrays["sources"], length=micro_batch.token_ids.shape[1])
    return PolicyInput(
        token_ids=copied(micro_batch.token_ids),
        position_ids=copied(micro_batch.position_ids),
        lengths=lengths,
        parents=row_parents(micro_batch.segments, lengths),
        loss_arrays={name: copied(array) for name, array in arrays.items()} | version,
        choice=choice.to(device),
        loss_fn=loss_fn,
        output=output,
        teacher_head=teacher_head,
        routing=routing,
        context=part,
    )


def policy_forward(
    model: PreTrainedModel, inputs: PolicyInput, *, tp_group: dist.ProcessGroup | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute log-probabilities (of a scalar head: values), entropies or hidden states, or the loss if one is given.

    Args:
        model: its LM head is sharded along the vocabulary if `tp_group` is given.
        inputs: a micro-batch, on the model's device.
        tp_group: the tensor-parallel ranks; all of them call this with the same inputs.
    Returns: (float32[] summed loss, reported sums); without a loss (float32[R, M] log-probabilities, {}), or
        (float32[R, M, H] hidden states that predict the loss tokens, {}).
    """
    hidden = model.base_model(
        input_ids=inputs.token_ids, use_cache=False, **attention_arguments(model, inputs)
    ).last_hidden_state  # [R, L, H]
    return loss_of_hidden(model, hidden, inputs, tp_group=tp_group)


def attention_arguments(model: PreTrainedModel, inputs: PolicyInput) -> dict[str, Any]:
    """Return the arguments by which the model's attention separates packed samples.

    With other attention functions transformers derives a block-diagonal mask from restarting position_ids, but only if
    it gets neither a mask nor a cache.

    Raises: ValueError for samples that share a prefix, or rows that are cut over context-parallel ranks, in a model
        with another attention function.
    """
    arguments: dict[str, Any] = {"position_ids": inputs.position_ids}
    if inputs.routing is not None:
        arguments["routing"] = inputs.routing
    if model.config._attn_implementation == packed_attention.NAME:
        arguments["lengths"] = inputs.lengths
        arguments["parents"] = inputs.parents
        arguments["groups"] = inputs.groups
        arguments["context"] = inputs.context
    elif inputs.context is not None:
        raise ValueError(f"the attention of {type(model).__name__} cannot be cut over context-parallel ranks")
    elif inputs.parents is not None:
        raise ValueError(f"the attention of {type(model).__name__} cannot share prefixes between samples")
    return arguments


def loss_of_hidden(
    model: PreTrainedModel, hidden: Tensor, inputs: PolicyInput, *, tp_group: dist.ProcessGroup | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute what `policy_forward` returns from the last hidden states [R, L, H], without full logits.

    Every context-parallel rank returns scores and sums of all loss tokens; its loss may be that of its own alone.
    """
    if inputs.after_hidden is not None:
        return inputs.after_hidden(model, hidden, tp_group)
    if inputs.output == "hidden":
        rows = torch.arange(len(hidden), device=hidden.device)[:, None]
        return _of_all_ranks(hidden[rows, inputs.loss_arrays["sources"]].float(), inputs), {}
    if not isinstance(inputs.loss_fn, DistilledLoss):
        return _loss_of_tokens(model, hidden, inputs, tp_group)
    with torch.set_grad_enabled(torch.is_grad_enabled() and inputs.loss_fn.loss_coeff != 0):
        loss, sums = _loss_of_tokens(model, hidden, inputs, tp_group)
    kl, kl_sums = _kl_to_teacher(model, hidden, inputs, inputs.loss_fn, tp_group)
    return loss + kl, merge_sums(sums, kl_sums)


def _of_all_ranks(values: Tensor, inputs: PolicyInput) -> Tensor:
    """Gather the values of loss tokens over context-parallel ranks, [R, m, ...] to [R, M, ...]."""
    return values if inputs.context is None else inputs.context.gather_loss_values(values)


def _kl_to_teacher(
    model: PreTrainedModel,
    hidden: Tensor,
    inputs: PolicyInput,
    loss_fn: DistilledLoss,
    tp_group: dist.ProcessGroup | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the divergence's term of the loss, float32[], and its sums."""
    head, teacher, arrays = model.get_output_embeddings(), inputs.teacher_head, inputs.loss_arrays
    if teacher is None:
        raise ValueError("a distilled loss needs the teacher's LM head")
    its_hidden = arrays.get("teacher_hidden")
    if its_hidden is None and arrays["loss_mask"].any():
        raise ValueError("a distilled loss needs teacher_hidden: score the batch with a teacher")
    if its_hidden is None:  # of a blank micro-batch
        its_hidden = hidden.new_zeros((*arrays["token_ids"].shape, teacher.weight.shape[1]))
    kl, sums = vocabulary_kl_loss(
        hidden,
        head_weight(model),
        head.bias,
        arrays,
        teacher_hidden=its_hidden,
        teacher_weight=teacher.weight,
        teacher_bias=teacher.bias,
        direction=loss_fn.direction,
        group=tp_group,
        choice=inputs.choice,
    )
    sums = sums if inputs.context is None else inputs.context.add_sums(sums)
    return loss_fn.kl_coeff * kl, {**sums, "loss_sum": loss_fn.kl_coeff * sums["loss_sum"]}


def _loss_of_tokens(
    model: PreTrainedModel, hidden: Tensor, inputs: PolicyInput, tp_group: dist.ProcessGroup | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss from log-probabilities, or these themselves, as `policy_forward` returns them."""
    arrays = {name: array for name, array in inputs.loss_arrays.items() if name != "teacher_hidden"}
    loss_fn, value_head, context = inputs.loss_fn, scalar_head(model), inputs.context
    whole = arrays if context is None else context.whole_arrays
    if value_head is not None:
        values = _of_all_ranks(scalar_values(value_head, hidden, arrays["sources"], arrays["loss_mask"]), inputs)
        return (values, {}) if loss_fn is None else loss_fn(values, torch.zeros_like(values), whole)
    weight, bias = head_weight(model), model.get_output_embeddings().bias
    # A loss without this attribute may depend on several tokens at once.
    if loss_fn is not None and getattr(loss_fn, "is_token_separable", False):
        loss, sums = fused_token_loss(hidden, weight, bias, arrays, loss_fn, group=tp_group, choice=inputs.choice)
        sums = sums if context is None else context.add_sums(sums)
        if loss_fn.is_final(sums):  # the same on all tensor-parallel and context-parallel ranks, since the sums are
            return loss, sums
    logprobs, entropy = token_logprobs(
        hidden,
        weight,
        bias,
        arrays["token_ids"],
        arrays["sources"],
        arrays["loss_mask"],
        arrays["temperature"],
        group=tp_group,
        choice=inputs.choice,
    )
    if loss_fn is None:
        return _of_all_ranks(entropy if inputs.output == "entropy" else logprobs, inputs), {}
    return loss_fn(_of_all_ranks(logprobs, inputs), _of_all_ranks(entropy, inputs), whole)


def load_policy(model_dir: Path, *, dtype: torch.dtype, gradient_checkpointing: bool = False) -> PreTrainedModel:
    """Load a Hugging Face causal language model without running any code from the model directory; see `prepare`.

    Its parameters may have the dtype of the files, until `convert`; see `read_model`.

    Raises: ConfigError if it cannot be read, or has no plain LM head. Whether its logits are the head's plain output is
        tried before a job starts; see `consumer.proofs`.
    """
    model: PreTrainedModel
    config = read_config(model_dir, f"--model {model_dir}")
    model, _ = read_model(AutoModelForCausalLM, model_dir, config, dtype=dtype)
    if not has_plain_head(model):
        raise ConfigError(f"--model {model_dir}: {type(model).__name__} has no plain LM head, which training needs")
    return prepare(model, gradient_checkpointing=gradient_checkpointing)


def has_plain_head(model: PreTrainedModel) -> bool:
    """Return True if the logits come from one linear layer, whose weights `policy_forward` uses in chunks."""
    return isinstance(model.get_output_embeddings(), nn.Linear)
