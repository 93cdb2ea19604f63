"""Load a checkpoint as another program would: with transformers, or PEFT for adapters, and compute one text."""

from pathlib import Path
from typing import Any

import torch

from coati_rl.errors import RunError
from coati_rl.model_files.adapter_files import is_adapter, read_adapter
from coati_rl.model_files.config import read_config
from coati_rl.model_files.quiet import no_load_report, no_progress_bars
from coati_rl.preflight.resources import read_tokenizer

_TEXT = "1 + 1 = 2"


def load_checkpoint(directory: Path) -> str:
    """Return what was loaded. Raises: RunError if it cannot be loaded, or computes what is no number."""
    try:
        with no_progress_bars(), no_load_report(), torch.no_grad():
            model, what = _load(directory)
            tokenizer = read_tokenizer(directory)
            logits = model(**tokenizer(_TEXT, return_tensors="pt", return_token_type_ids=False)).logits
    except Exception as error:
        raise RunError(
            f"the checkpoint cannot be loaded by transformers: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    if not torch.isfinite(logits).all():
        raise RunError("the checkpoint computes values that are no numbers")
    return f"{what}, {len(tokenizer)} tokens, finite values"


def _load(directory: Path) -> tuple[Any, str]:
    """Return the model that a checkpoint holds, and its name."""
    import transformers

    where = f"checkpoint {directory.name}"
    if not is_adapter(directory):
        config = read_config(directory, where)
        kind = getattr(transformers, (config.architectures or ("AutoModelForCausalLM",))[0])
        return kind.from_pretrained(directory), kind.__name__
    from peft import PeftModel

    base = Path(read_adapter(directory, where).base or "")
    model, name = _load(base)
    return PeftModel.from_pretrained(model, directory), f"adapter of {name}"
