"""A decoder's forward cut into pipeline stages: embedding, layers, final norm, then LM head and loss.

One for every architecture whose base model is that and nothing else; `check_stages` runs both on a few tokens before
the model is cut, so that an architecture that does more in its forward (scaled embeddings, say) is refused by name.
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
from consumer.models.packed_attention import RowLengths
from consumer.models.policy_model import PolicyInput, attention_arguments, loss_of_hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Layers [first, last) of the model, and whether it begins or ends here."""

    first: int
    last: int
    is_first: bool
    is_last: bool


def stage_forward(
    model: PreTrainedModel,
    queue: Iterator[PolicyInput],
    places: Tensor,
    hidden_states: Tensor | None = None,
    *,
    stage: Stage,
    tp_group: dist.ProcessGroup | None = None,
) -> Any:
    """One micro-batch through one stage; ColossalAI's scheduler calls it in the order of the micro-batches.

    Args:
        model: of which this rank holds the stage's modules.
        queue: the micro-batches that are left. They travel in this iterator and not as the scheduler's batch, which
            would have to be one tensor of equal rows.
        places: one row per micro-batch; the scheduler counts them.
        hidden_states: [R, L, H] from the stage before.
        stage: which part of the model.
        tp_group: as for `policy_forward`.
    Returns: {"hidden_states": [R, L, H]} for the next stage; on the last stage what `policy_forward` returns.
    """
    inputs = next(queue)
    hidden = run_layers(model, inputs, hidden_states, stage)
    if not stage.is_last:
        return {"hidden_states": hidden}
    return loss_of_hidden(model, hidden, inputs, tp_group=tp_group)


def run_layers(model: PreTrainedModel, inputs: PolicyInput, hidden: Tensor | None, stage: Stage) -> Tensor:
    """The stage's part of the base model's forward: [R, L, H] to [R, L, H]."""
    base, arguments = model.base_model, attention_arguments(model, inputs)
    if stage.is_first:
        hidden = base.embed_tokens(inputs.token_ids)
    if hidden is None:
        raise ValueError("a stage that is not the first needs the hidden states of the one before")
    masks = _masks(model, hidden, arguments.pop("attention_mask"), arguments["position_ids"])
    rotary = base.rotary_emb(hidden, arguments["position_ids"])
    for index in range(stage.first, stage.last):
        mask = masks[model.config.layer_types[index]] if isinstance(masks, dict) else masks
        hidden = base.layers[index](hidden, attention_mask=mask, position_embeddings=rotary, **arguments)
    return base.norm(hidden) if stage.is_last else hidden


def _masks(model: PreTrainedModel, hidden: Tensor, mask: Tensor | None, position_ids: Tensor) -> Any:
    """transformers' mask, or one per type of layer; our own attention needs none."""
    if model.config._attn_implementation == packed_attention.NAME:
        return mask
    return create_masks_for_generate(model.config, hidden, mask, None, position_ids)


@torch.no_grad()
def check_stages(model: PreTrainedModel, layers_per_stage: list[int]) -> None:
    """Refuse a model whose stages, one after another, do not compute what its own forward computes.

    Raises: ConfigError.
    """
    lengths: RowLengths = ((5, 4),)
    places = [place for length in lengths[0] for place in range(length)]
    device = next(model.parameters()).device
    token_ids = torch.arange(len(places), device=device)[None] % model.config.vocab_size
    inputs = PolicyInput(token_ids=token_ids, position_ids=torch.tensor([places], device=device), lengths=lengths)
    expected = model.base_model(
        input_ids=token_ids, use_cache=False, **attention_arguments(model, inputs)
    ).last_hidden_state
    hidden: Tensor | None = None
    try:
        for stage in stages_of(layers_per_stage):
            hidden = run_layers(model, inputs, hidden, stage)
        is_same = hidden is not None and torch.equal(hidden, expected)
    except (AttributeError, TypeError, KeyError):  # an architecture with other modules or other arguments
        is_same = False
    if not is_same:
        raise ConfigError(
            f"--pipeline-parallel-size {len(layers_per_stage)}: {type(model).__name__} cannot be cut into stages, "
            "since its forward is more than embedding, layers and norm; use -pp 1"
        )


def stages_of(layers_per_stage: list[int]) -> list[Stage]:
    """The stages, first to last."""
    ends = [sum(layers_per_stage[: index + 1]) for index in range(len(layers_per_stage))]
    return [
        Stage(first=end - count, last=end, is_first=index == 0, is_last=index == len(ends) - 1)
        for index, (end, count) in enumerate(zip(ends, layers_per_stage, strict=True))
    ]
