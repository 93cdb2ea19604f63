"""Check a model directory for what a job does with it: train, score, sample or rate.

Consumes the directory alone: no Ray, no engine, no memory of the model's size. Messages name the flag, the directory,
and the file, tensor or field.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from coati_rl.errors import ConfigError
from coati_rl.model_files.config import DEQUANTIZED, quantization_method, read_config
from coati_rl.model_files.names import compare
from coati_rl.model_files.saving import read_generation, try_to_save
from coati_rl.model_files.stored import StoredTensor, read_stored
from coati_rl.model_files.values import HEAD, check_stored_values, has_own_head

# trained: by trainers, who save it; scored: by trainers, frozen; sampled: by an engine; rated: with a scalar head.
Use = Literal["trained", "scored", "sampled", "rated"]

_BIAS = "score.bias"  # of a classifier of tokens
_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ENGINE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Hold what a check found."""

    has_own_head: bool  # although config.json says that the LM head is the embedding
    warnings: tuple[str, ...] = ()


def check_model_files(
    directory: Path, *uses: Use, where: str | None = None, precision: str | None = None
) -> ModelFacts:
    """Check config.json, weight files, tensors and values, and whether a checkpoint can be written.

    Args:
        directory: of the model, with a config.json.
        uses: what is done with it; none: the weights are not read.
        where: the flag and what it named, for messages; None: --model.
        precision: that weights are loaded in, fp32 or bf16; None: that of the files.
    Raises: ConfigError.
    """
    stats = {path.name: path.stat() for path in sorted(directory.iterdir()) if path.is_file()}
    seen = tuple((name, each.st_size, each.st_mtime_ns) for name, each in stats.items())
    return _check(directory, frozenset(uses), where or f"--model {directory}", precision, seen)


@functools.lru_cache(maxsize=16)
def _check(
    directory: Path, uses: frozenset[Use], where: str, precision: str | None, seen: tuple[tuple[str, int, int], ...]
) -> ModelFacts:
    """Check as `check_model_files` does, once as long as the files' sizes and times (`seen`) are the same."""
    config = read_config(directory, where)
    _check_kind(directory, config, uses, where)
    if not uses:
        return ModelFacts(has_own_head=False)
    stored = read_stored(directory, where, takes_any=uses == {"sampled"})
    _check_for_engine(stored, uses, where)
    _check_names(config, stored, uses, where)
    check_stored_values(stored, where)
    read_generation(directory, where)
    warnings = try_to_save(directory, config, where) if "trained" in uses else []
    reads_tied_head = "rated" not in uses and getattr(config.get_text_config(), "tie_word_embeddings", False)
    is_own = reads_tied_head and has_own_head(stored, _PRECISIONS.get(precision or ""), where)
    if is_own:
        warnings.append(
            f"{where}: config.json says tie_word_embeddings, and the files have another {HEAD}: that one is used, by "
            "trainers and engines, and checkpoints say so"
        )
    return ModelFacts(has_own_head=is_own, warnings=tuple(warnings))


def _check_kind(directory: Path, config: Any, uses: frozenset[Use], where: str) -> None:
    """Raise ConfigError for an adapter, and for a quantised model that is trained or gets updates."""
    if uses != {"sampled"} and (directory / "adapter_config.json").is_file():
        raise ConfigError(
            f"{where}: adapter_config.json: is an adapter of another model; merge it (PEFT: merge_and_unload) and save "
            "the model, or remove the file"
        )
    method = quantization_method(config)
    is_by_trainer = bool(uses & {"trained", "scored"})
    if method is None or not is_by_trainer or (method in DEQUANTIZED and "sampled" not in uses):
        return
    why = "trainers compute in floating point" if method not in DEQUANTIZED else "engines take updates of plain weights"
    raise ConfigError(
        f"{where}: config.json: quantization_config has quant_method {method}, and {why}; use the model that it was "
        "made from, or dequantise it"
    )


def _check_for_engine(stored: Mapping[str, StoredTensor], uses: frozenset[Use], where: str) -> None:
    """Raise ConfigError for files that engines do not read."""
    if "sampled" not in uses:
        return
    for name, each in stored.items():
        if each.file.suffix == ".bin":
            raise ConfigError(
                f"{where}: {each.file.name}: engines read safetensors alone; save the model with save_pretrained"
            )
        if each.meta.dtype not in _ENGINE_DTYPES:
            dtype = str(each.meta.dtype).removeprefix("torch.")
            raise ConfigError(
                f"{where}: {each.file.name}: {name} is {dtype}, and engines here take float32, bfloat16 and float16; "
                "use the model that it was made from"
            )


def _check_names(config: Any, stored: Mapping[str, StoredTensor], uses: frozenset[Use], where: str) -> None:
    """Raise ConfigError if names or shapes differ from those of the architecture that reads the files."""
    is_classifier = "rated" in uses and is_sequence_classifier(config)
    if "rated" in uses:
        check_one_label(config, where)
        if _BIAS in stored:
            raise ConfigError(
                f"{where}: has a {_BIAS}, and a head of one value has none here; use a sequence classifier with one "
                "label, a directory of coati-rl rm, or the language model that it was made from"
            )
    if uses == {"sampled"}:
        build = _class_of_engine(config, stored)
    else:
        build = _class_of_trainer(config, has_scalar_head="rated" in uses)
        if build is None:
            raise ConfigError(f"{where}: config.json: transformers has no causal language model {config.model_type}")
    if build is None or (quantization_method(config) not in {None, *DEQUANTIZED}):
        return
    try:
        differences = compare(
            build,
            config,
            {name: each.meta for name, each in stored.items()},
            has_new_head="rated" in uses and not is_classifier,
        )
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    differences.check(where)


def check_one_label(config: Any, where: str) -> None:
    """Raise ConfigError for a classifier of several labels, whose head gives no single value."""
    if is_sequence_classifier(config) and config.num_labels != 1:
        raise ConfigError(
            f"{where} is a classifier with {config.num_labels} labels, and a reward model or critic has one; "
            "use one of these, or the language model it was made from"
        )


def is_sequence_classifier(config: Any) -> bool:
    """Return True if config.json names a model with a head of one value a label."""
    return any("SequenceClassification" in str(name) for name in config.architectures or ())


def _class_of_engine(config: Any, stored: Mapping[str, StoredTensor]) -> Callable[[Any], Any] | None:
    """Return what builds the class that config.json names; None without one in transformers, or for others' formats."""
    import transformers

    named = getattr(transformers, str((config.architectures or ("",))[0]), None)
    is_standard = all(each.file.name.startswith("model") for each in stored.values())
    return named._from_config if named is not None and is_standard else None


def _class_of_trainer(config: Any, *, has_scalar_head: bool) -> Callable[[Any], Any] | None:
    """Return what builds the model as trainers do; None if transformers has none."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    auto: Any = AutoModelForSequenceClassification if has_scalar_head else AutoModelForCausalLM
    return auto.from_config if type(config) in auto._model_mapping else None
