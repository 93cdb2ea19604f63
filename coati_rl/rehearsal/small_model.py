"""Write a two-layer model that stands for a large one: its architecture, vocabulary and tokenizer, random weights."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coati_rl.checkpoint.tokenizer_files import read_tokenizer_files, write_files
from coati_rl.errors import ConfigError
from coati_rl.model_files.config import read_config
from coati_rl.model_files.quiet import no_progress_bars
from coati_rl.preflight.tiny_model import tiny_model

_GENERATION = "generation_config.json"


def write_small_model(
    directory: Path,
    out: Path,
    *,
    where: str,
    check: Callable[[Any], None],
    num_heads: int,
    num_layers: int,
    precision: str,
) -> None:
    """Write the model.

    Args:
        directory: of the large one, which may lack its weights.
        out: directory to write.
        where: flag and name of the large one, for messages.
        check: raises ConfigError if a model (its transformers config) cannot be cut as the rehearsal asks.
        num_heads: heads for keys and values at least.
        num_layers: layers at least.
        precision: of the written weights, fp32 or bf16.
    Raises: ConfigError if transformers cannot build the architecture small.
    """
    whole = read_config(directory, where)
    auto, config = _auto_class(whole), whole.get_text_config()

    def build(small: Any) -> nn.Module:
        check(small)
        module: nn.Module = auto.from_config(small)
        return module

    try:
        model = tiny_model(config, build, num_kv_heads=num_heads, num_layers=num_layers, keeps_vocabulary=True)
    except ValueError as error:
        raise ConfigError(f"{where} ({config.model_type}): no small model of it can be made ({error})") from error
    with no_progress_bars():
        model.to(torch.bfloat16 if precision == "bf16" else torch.float32).save_pretrained(out)
    write_files(out, read_tokenizer_files(directory))
    if (directory / _GENERATION).is_file():
        shutil.copy(directory / _GENERATION, out / _GENERATION)


def _auto_class(config: Any) -> Any:
    """Return what builds the class that config.json names: a classifier, else a causal language model."""
    import transformers

    named = (config.architectures or ("",))[0]
    for kind in ("SequenceClassification", "TokenClassification"):
        if named.endswith(f"For{kind}"):
            return getattr(transformers, f"AutoModelFor{kind}")
    return transformers.AutoModelForCausalLM
