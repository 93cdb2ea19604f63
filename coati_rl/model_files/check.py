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
from coati_rl.model_files.classifiers import SCORE, auto_class_of, check_one_label, kind_of
from coati_rl.model_files.config import DEQUANTIZED, quantization_method, read_config
from coati_rl.model_files.names import NameDifferences, compare
from coati_rl.model_files.saving import read_generation, try_to_save
from coati_rl.model_files.stored import StoredTensor, read_stored
from coati_rl.model_files.values import HEAD, check_stored_values, has_own_head

# trained: by trainers, who save it; scored: by trainers, frozen; sampled: by an engine; with a scalar head that is read
# rated: once a sample, valued: at each token.
Use = Literal["trained", "scored", "sampled", "rated", "valued"]

_SCALAR: frozenset[Use] = frozenset({"rated", "valued"})
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
    differences = _check_names(config, stored, uses, where)
    check_stored_values(stored, where)
    read_generation(directory, where)
    warnings = try_to_save(directory, config, where) if "trained" in uses else []
    if "trained" in uses and differences:
        warnings += differences.warnings(where)
    reads_tied_head = not uses & _SCALAR and getattr(config.get_text_config(), "tie_word_embeddings", False)
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
            f"{where}: adapter_config.json: is an adapter of another model; merge it (coati-rl merge) and save "
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


def _check_names(
    config: Any, stored: Mapping[str, StoredTensor], uses: frozenset[Use], where: str
) -> NameDifferences | None:
    """Compare names and shapes with those of the architecture that reads the files; None if none can be built here.

    Raises: ConfigError if they differ.
    """
    has_scalar_head = bool(uses & _SCALAR)
    kind = kind_of(config, stored) if has_scalar_head else None
    if has_scalar_head:
        check_one_label(config, where)
    if kind == "tokens":
        _check_values_of_tokens(stored, uses, where)
        config.num_labels = 1  # two where config.json names no classifier
    if uses == {"sampled"}:
        build = _class_of_engine(config, stored)
    else:
        build = _class_of_trainer(config, auto_class_of(kind) if has_scalar_head else None)
        if build is None:
            raise ConfigError(f"{where}: config.json: transformers has no causal language model {config.model_type}")
    if build is None or (quantization_method(config) not in {None, *DEQUANTIZED}):
        return None
    try:
        differences = compare(
            build,
            config,
            {name: each.meta for name, each in stored.items()},
            has_new_head=has_scalar_head and kind is None,
        )
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    differences.check(where)
    return differences


def _check_values_of_tokens(stored: Mapping[str, StoredTensor], uses: frozenset[Use], where: str) -> None:
    """Raise ConfigError for a classifier of tokens as a reward model, or with a head of another name."""
    if "rated" in uses:
        raise ConfigError(
            f"{where}: is a classifier of tokens, and a reward model is one of sequences, without a bias; use such a "
            "classifier with one label, a directory of coati-rl rm, or the language model that it was made from"
        )
    if SCORE not in stored:
        raise ConfigError(f"{where}: is a classifier of tokens, and its files lack {SCORE}, the head that is read here")


def _class_of_engine(config: Any, stored: Mapping[str, StoredTensor]) -> Callable[[Any], Any] | None:
    """Return what builds the class that config.json names; None without one in transformers, or for others' formats."""
    import transformers

    named = getattr(transformers, str((config.architectures or ("",))[0]), None)
    is_standard = all(each.file.name.startswith("model") for each in stored.values())
    return named._from_config if named is not None and is_standard else None


def _class_of_trainer(config: Any, of_scalar_head: Any | None) -> Callable[[Any], Any] | None:
    """Return what builds the model as trainers do, with an LM head or a class of scalar head; None without one."""
    from transformers import AutoModelForCausalLM

    auto: Any = of_scalar_head or AutoModelForCausalLM
    return auto.from_config if type(config) in auto._model_mapping else None
