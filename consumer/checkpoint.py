"""A checkpoint on disk: an ordinary Hugging Face model directory, the optimizer's tensors, and state.json.

It appears under its name complete or not at all: everything is written into a hidden sibling directory, flushed to the
disk and renamed. `transformers.AutoModelForCausalLM.from_pretrained` reads it as it is. One process writes.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from coati_rl.errors import ConfigError, RunError
from consumer.policy_model import no_progress_bars

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def save_checkpoint(
    directory: Path,
    *,
    model: PreTrainedModel,
    tokenizer_dir: Path,
    optimizer_tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
) -> None:
    """Write a checkpoint and publish it; one that is already there is replaced.

    Args:
        directory: the checkpoint's name; its parents are created.
        model: the unwrapped model.
        tokenizer_dir: the tokenizer's files are copied from here, byte for byte.
        optimizer_tensors: name to tensor, as `load_optimizer_tensors` will return it.
        state: what else a resume needs, as JSON.
    Raises: RunError if the disk refuses.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # a killed run may have left one
        partial.mkdir(parents=True)
        with no_progress_bars():
            model.save_pretrained(partial)
        for name in TOKENIZER_FILES:
            if (tokenizer_dir / name).is_file():
                shutil.copyfile(tokenizer_dir / name, partial / name)
        save_file({name: tensor.contiguous() for name, tensor in optimizer_tensors.items()}, partial / OPTIMIZER_FILE)
        (partial / STATE_FILE).write_text(json.dumps(dict(state), indent=2, sort_keys=True) + "\n")
        _publish(partial, directory)
    except OSError as error:
        raise RunError(f"checkpoint {directory} could not be written: {error}") from error


def load_state(directory: Path) -> dict[str, Any]:
    """The `state` of a checkpoint. Raises: ConfigError if the directory is none."""
    try:
        state: dict[str, Any] = json.loads((directory / STATE_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory} is no checkpoint to resume from: {error}") from error
    return state


def load_optimizer_tensors(directory: Path) -> dict[str, Tensor]:
    """The `optimizer_tensors` of a checkpoint, on the CPU. Raises: ConfigError if the directory is none."""
    try:
        return load_file(directory / OPTIMIZER_FILE)
    except OSError as error:
        raise ConfigError(f"{directory} is no checkpoint to resume from: {error}") from error


def _publish(partial: Path, directory: Path) -> None:
    for path in [*partial.rglob("*"), partial]:
        _flush(path)
    if directory.exists():
        # A rename cannot replace a directory that holds files; the old one stands aside for as long as it takes.
        old = directory.with_name(f".{directory.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
        partial.rename(directory)
        shutil.rmtree(old)
    else:
        partial.rename(directory)
    _flush(directory.parent)


def _flush(path: Path) -> None:
    """Force a file's bytes, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
