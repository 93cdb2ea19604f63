"""Give a decoder a head of one output per token: a reward model's score, or a critic's value.

The module is transformers' `AutoModelForSequenceClassification` with one label: the decoder, then a linear layer
`score`; or, of a directory that holds one, `AutoModelForTokenClassification`, whose `score` has a bias. transformers
reads a sequence's score at the last token that is not `config.pad_token_id`; here the loss arrays say where
(`sources`), so that one row can hold several samples and a sample several values. The layer is replicated over
tensor-parallel ranks, which all have the same hidden states, and is on the last pipeline stage.

R rows, L tokens per row, M loss tokens per row, H hidden size.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from coati_rl.errors import ConfigError
from coati_rl.model_files.classifiers import SCORE, auto_class_of, check_one_label, kind_of
from coati_rl.model_files.config import read_config
from coati_rl.model_files.quiet import no_load_report
from coati_rl.model_files.stored import read_stored
from consumer.models.loading import prepare, read_model

_NAME = SCORE.removesuffix(".weight")  # of the layer in transformers' decoders


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalarHead:
    """Ask for a scalar head instead of an LM head."""

    seed: int | None = 0  # of the initial weights, where the model directory has none; None: they are 0
    pad_token_id: int | None = None  # after which transformers looks for no score; None: the model's own


def scalar_head(model: PreTrainedModel) -> nn.Linear | None:
    """Return the scalar head; None of a language model."""
    head = getattr(model, _NAME, None)
    return head if isinstance(head, nn.Linear) else None


def scalar_values(head: nn.Linear, hidden: Tensor, sources: Tensor, mask: Tensor) -> Tensor:
    """Compute the head's output at the sources, in float32 whatever the model computes in.

    Args:
        head: one output feature.
        hidden: [R, L, H] after the final norm; carries gradient.
        sources: int64[R, M], places in a row.
        mask: bool[R, M], True on the places that the loss reads.
    Returns: float32[R, M], 0 where the mask is False.
    """
    chosen = hidden.gather(1, sources[..., None].expand(-1, -1, hidden.shape[-1]))  # [R, M, H]
    bias = None if head.bias is None else head.bias.float()
    values = F.linear(chosen.float(), head.weight.float(), bias).squeeze(-1)
    return torch.where(mask, values, 0.0)


def load_scalar(
    model_dir: Path, head: ScalarHead, *, dtype: torch.dtype, gradient_checkpointing: bool = False
) -> PreTrainedModel:
    """Load a decoder with a scalar head without running any code from the model directory.

    From a language model's directory the head is new, drawn from N(0, 1 / (H + 1)) by its seed alone, so that it is the
    same on every rank (arXiv:2009.01325), or 0. From a classifier's, of sequences or of tokens, it is the saved one,
    and a checkpoint is of the same class. Dtypes: `read_model`.

    Raises: ConfigError if the directory cannot be read, its classifier has several labels or lacks a part of its head,
        or its architecture has no classifier of this form.
    """
    where = f"--model {model_dir}"
    config = read_config(model_dir, where)
    check_one_label(config, where)
    kind = kind_of(config, read_stored(model_dir, where))
    config.num_labels = 1
    text_config = config.get_text_config()
    text_config.pad_token_id = _pad_token_id(model_dir, text_config, head)
    with no_load_report():  # the LM head is unused and the score layer new; both are intended
        model, missing = read_model(auto_class_of(kind), model_dir, config, dtype=dtype, has_new_head=kind is None)
    layer = scalar_head(model)
    if layer is None or missing - {SCORE}:
        lacks = ", ".join(sorted(missing - {SCORE})) or f"a linear layer {_NAME}"
        raise ConfigError(f"--model {model_dir}: {type(model).__name__} lacks {lacks}, which a reward model needs")
    if missing:
        _initialise(layer, head.seed)
    return prepare(model, gradient_checkpointing=gradient_checkpointing)


@torch.no_grad()
def _initialise(layer: nn.Linear, seed: int | None) -> None:
    """Draw the weights from N(0, 1 / (H + 1)), independent of torch's global random state."""
    if seed is None:
        layer.weight.zero_()
        return
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(layer.weight.shape, generator=generator) / (layer.in_features + 1) ** 0.5
    layer.weight.copy_(drawn)


def _pad_token_id(model_dir: Path, config: Any, head: ScalarHead) -> int:
    if head.pad_token_id is not None:
        return head.pad_token_id
    eos = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    found = eos if config.pad_token_id is None else config.pad_token_id
    if found is None:
        raise ConfigError(
            f"--model {model_dir} names neither a padding nor an end-of-sequence token, and transformers finds a "
            "sequence's score by its padding; set pad_token_id in config.json"
        )
    return cast(int, found)
