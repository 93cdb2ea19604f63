"""A Hugging Face causal language model as a policy: what it is fed, and its forward up to the loss.

In: a `MicroBatch`. Out: log-probabilities, or the summed loss and its report. The LM head and the loss are computed
inside the model's own forward: a pipeline's last stage needs them there. R rows, L tokens per row, M loss tokens per
row, H hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as hf_logging

from coati_rl.batch import MicroBatch
from coati_rl.errors import ConfigError
from coati_rl.ops.fused_loss import fused_token_loss
from coati_rl.ops.logprob import token_logprobs
from consumer.models import packed_attention
from consumer.models.packed_attention import RowLengths, row_lengths, segment_mask

if TYPE_CHECKING:
    from coati_rl.protocols import LossFn

Precision = Literal["fp32", "bf16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Settings by which some architectures change their logits after the LM head; `policy_forward` does not know them.
LOGIT_SETTINGS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyInput:
    """One forward. Wrappers that cast or move tensor arguments leave it alone, as it is not a container they know."""

    token_ids: Tensor  # int64[R, L]
    position_ids: Tensor  # int64[R, L]
    lengths: RowLengths | None = None  # of the segments in each row; None if no row holds more than one
    attention_mask: Tensor | None = None  # bool[R, 1, L, L], what each token sees; only where segments have parents
    loss_arrays: dict[str, Tensor] = field(default_factory=dict)  # by name, each [R, M]; and trainer_version, int64[]
    loss_fn: "LossFn | None" = None  # None: log-probabilities only


def make_input(
    micro_batch: MicroBatch, *, device: torch.device, trainer_version: int = -1, loss_fn: "LossFn | None" = None
) -> PolicyInput:
    """Copy a micro-batch's arrays to the device.

    Raises: ValueError if a token that the loss counts has a temperature that logits cannot be divided by.
    """

    def copied(array: np.ndarray) -> Tensor:
        # torch.tensor copies: arrays that come out of Ray's object store are read-only.
        return torch.tensor(array, device=device)

    arrays = micro_batch.loss_arrays
    # Checked here, in NumPy: asking the device would stall it in every forward.
    if not (arrays["temperature"][arrays["loss_mask"]] > 0).all():
        raise ValueError("temperature must be positive on every token that the loss counts")
    has_parents = bool((micro_batch.segments[:, 3] >= 0).any())
    return PolicyInput(
        token_ids=copied(micro_batch.token_ids),
        position_ids=copied(micro_batch.position_ids),
        lengths=None if has_parents else row_lengths(micro_batch.segments, micro_batch.token_ids.shape),
        attention_mask=copied(segment_mask(micro_batch.segments, micro_batch.token_ids.shape)) if has_parents else None,
        loss_arrays={name: copied(array) for name, array in arrays.items()}
        | {"trainer_version": torch.tensor(trainer_version, device=device)},
        loss_fn=loss_fn,
    )


def policy_forward(
    model: PreTrainedModel, inputs: PolicyInput, *, tp_group: dist.ProcessGroup | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The model's hidden states, their tokens' log-probabilities, and the loss if one is given.

    Args:
        model: with its LM head cut along the vocabulary if `tp_group` is given.
        inputs: a micro-batch, on the model's device.
        tp_group: the tensor-parallel ranks; all take part with the same inputs.
    Returns: (float32[] summed loss, sums to report); without a loss (float32[R, M] log-probabilities, {}).
    """
    hidden = model.base_model(
        input_ids=inputs.token_ids, use_cache=False, **attention_arguments(model, inputs)
    ).last_hidden_state  # [R, L, H]
    return loss_of_hidden(model, hidden, inputs, tp_group=tp_group)


def attention_arguments(model: PreTrainedModel, inputs: PolicyInput) -> dict[str, Any]:
    """Return what tells the model's attention which tokens belong together.

    Without our attention transformers keeps packed samples apart by itself: from restarting position_ids it makes a
    block-diagonal mask, but only without a mask and without a cache.
    """
    arguments: dict[str, Any] = {"position_ids": inputs.position_ids, "attention_mask": inputs.attention_mask}
    if model.config._attn_implementation == packed_attention.NAME:
        arguments["lengths"] = inputs.lengths
    return arguments


def loss_of_hidden(
    model: PreTrainedModel, hidden: Tensor, inputs: PolicyInput, *, tp_group: dist.ProcessGroup | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """From the last hidden states [R, L, H] to what `policy_forward` returns; never whole logits."""
    head, arrays, loss_fn = model.get_output_embeddings(), inputs.loss_arrays, inputs.loss_fn
    # A loss that did not say so may look at several tokens at once.
    if loss_fn is not None and getattr(loss_fn, "is_token_separable", False):
        loss, sums = fused_token_loss(hidden, head.weight, head.bias, arrays, loss_fn, group=tp_group)
        if loss_fn.is_final(sums):  # the same on all tensor ranks, as the sums are
            return loss, sums
    logprobs, entropy = token_logprobs(
        hidden,
        head.weight,
        head.bias,
        arrays["token_ids"],
        arrays["sources"],
        arrays["loss_mask"],
        arrays["temperature"],
        group=tp_group,
    )
    if loss_fn is None:
        return logprobs, {}
    return loss_fn(logprobs, entropy, arrays)


def load_policy(model_dir: Path, *, dtype: torch.dtype, gradient_checkpointing: bool = False) -> PreTrainedModel:
    """Read a Hugging Face model; no code from the model directory is ever run.

    The model stays in eval mode: dropout would make a token's log-probability a matter of luck, and the ratio with it.
    With `gradient_checkpointing` the backward computes each decoder layer's activations again.

    Raises: ConfigError if it cannot be read or is no model whose logits are its LM head's alone.
    """
    try:
        with no_progress_bars():
            config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
            attention = packed_attention.NAME if config.model_type in packed_attention.MODEL_TYPES else "sdpa"
            model = AutoModelForCausalLM.from_pretrained(
                model_dir, config=config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
            )
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {model_dir} cannot be loaded: {error}") from error
    altered = [name for name in LOGIT_SETTINGS if getattr(model.config, name, None) not in (None, 1, 1.0)]
    if altered or not isinstance(model.get_output_embeddings(), nn.Linear):
        what = f"changes its logits by {', '.join(altered)}" if altered else "has no plain LM head"
        raise ConfigError(f"--model {model_dir}: {type(model).__name__} {what}, which training does not support")
    model.eval()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                _checkpoint_in_eval_mode(module)
    return model


def _checkpoint_in_eval_mode(layer: GradientCheckpointingLayer) -> None:
    """The layer looks for training mode before its forward; inside, dropout would (OPT's does)."""
    layer.training = True
    layer.register_forward_pre_hook(lambda layer, _: setattr(layer, "training", False))
    # Always: the recomputation leaves a forward by an exception as soon as it has what it needs.
    layer.register_forward_hook(lambda layer, *_: setattr(layer, "training", True), always_call=True)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing over the run's own progress display."""
    were_on = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            hf_logging.enable_progress_bar()
