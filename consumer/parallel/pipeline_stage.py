"""Run one pipeline stage of a decoder's forward: embedding, layers, final norm, then LM head and loss.

It fits every architecture whose base model consists of exactly these; `check_stages` compares it with the model's own
forward on a few tokens before sharding, so that an architecture that does more (such as scaled embeddings) is refused.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from coati_rl.errors import ConfigError
from consumer.models import packed_attention
from consumer.models.policy_model import PolicyInput, attention_arguments, loss_of_hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Describe a pipeline stage: decoder layers [first, last), and whether it is the first or the last stage."""

    first: int
    last: int
    is_first: bool
    is_last: bool


def stage_forward(
    model: PreTrainedModel,
    queue: Iterator[PolicyInput],
    placeholder: Tensor,
    hidden_states: Tensor | None = None,
    *,
    stage: Stage,
    tp_group: dist.ProcessGroup | None = None,
) -> Any:
    """Run one micro-batch through one stage; ColossalAI's scheduler calls it in the order of the micro-batches.

    Args:
        model: this rank holds the stage's modules of it.
        queue: the remaining micro-batches. They are passed in this iterator and not as the scheduler's batch, which
            must be one tensor with rows of equal size.
        placeholder: an empty tensor with one row per micro-batch, which the scheduler counts.
        hidden_states: [R, L, H] from the previous stage.
        stage: this rank's pipeline stage.
        tp_group: as for `policy_forward`.
    Returns: {"hidden_states": [R, L, H]} for the next stage; on the last stage what `policy_forward` returns.
    """
    inputs = next(queue)
    hidden = run_layers(model, inputs, hidden_states, stage)
    if not stage.is_last:
        return {"hidden_states": hidden}
    return loss_of_hidden(model, hidden, inputs, tp_group=tp_group)


def run_layers(model: PreTrainedModel, inputs: PolicyInput, hidden: Tensor | None, stage: Stage) -> Tensor:
    """Run the stage's part of the base model's forward, [R, L, H] to [R, L, H]."""
    base, arguments = model.base_model, attention_arguments(model, inputs)
    if stage.is_first:
        hidden = base.embed_tokens(inputs.token_ids)
    if hidden is None:
        raise ValueError("a pipeline stage that is not the first needs the hidden states of the previous one")
    masks = _masks(model, hidden, arguments["position_ids"])
    rotary = base.rotary_emb(hidden, arguments["position_ids"])
    for index in range(stage.first, stage.last):
        mask = masks[model.config.layer_types[index]] if isinstance(masks, dict) else masks
        hidden = base.layers[index](hidden, attention_mask=mask, position_embeddings=rotary, **arguments)
    return base.norm(hidden) if stage.is_last else hidden


def _masks(model: PreTrainedModel, hidden: Tensor, position_ids: Tensor) -> Any:
    """Return transformers' mask, or one per type of layer; packed attention uses none."""
    if model.config._attn_implementation == packed_attention.NAME:
        return None
    return create_masks_for_generate(model.config, hidden, None, None, position_ids)


@torch.no_grad()
def check_stages(model: PreTrainedModel, layers_per_stage: list[int]) -> None:
    """Raise a ConfigError if the pipeline stages in sequence do not compute the same as the model's own forward."""
    # Two samples; in packed attention also one that shares the first four tokens of the second.
    is_packed = model.config._attn_implementation == packed_attention.NAME
    positions = [0, 1, 2, 3, 4, 0, 1, 2, 3, *((4, 5, 4) if is_packed else ())]
    device = next(model.parameters()).device
    token_ids = torch.arange(len(positions), device=device)[None] % model.config.vocab_size
    inputs = PolicyInput(
        token_ids=token_ids,
        position_ids=torch.tensor([positions], device=device),
        lengths=((5, 4, 2, 1),) if is_packed else ((5, 4),),
        parents=((-1, -1, 1, 1),) if is_packed else None,
    )
    expected = model.base_model(
        input_ids=token_ids, use_cache=False, **attention_arguments(model, inputs)
    ).last_hidden_state
    hidden: Tensor | None = None
    try:
        for stage in stages_of(layers_per_stage):
            hidden = run_layers(model, inputs, hidden, stage)
        is_same = hidden is not None and torch.equal(hidden, expected)
    except (AttributeError, TypeError, KeyError):  # an architecture with other modules or arguments
        is_same = False
    if not is_same:
        raise ConfigError(
            f"--pipeline-parallel-size {len(layers_per_stage)}: {type(model).__name__} cannot be split into stages, "
            "since its forward does more than embedding, layers and norm; use -pp 1"
        )


def stages_of(layers_per_stage: list[int]) -> list[Stage]:
    """Return the pipeline stages, first to last."""
    ends = [sum(layers_per_stage[: index + 1]) for index in range(len(layers_per_stage))]
    return [
        Stage(first=end - count, last=end, is_first=index == 0, is_last=index == len(ends) - 1)
        for index, (end, count) in enumerate(zip(ends, layers_per_stage, strict=True))
    ]
