"""Merge an adapter into its base: a Hugging Face model directory with weight + scale * B @ A in place of each weight.

The directory appears complete or not at all, and only after `merge_proof` has compared its outputs with those of the
base with the adapter, for which each of the two is loaded in float32, one after the other.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from coati_rl.checkpoint.saved_adapter import check_base
from coati_rl.errors import ConfigError
from coati_rl.model_files.adapted_layers import is_saved_whole
from coati_rl.model_files.adapter_files import AdapterDirectory, is_adapter, read_adapter
from coati_rl.model_files.check import check_model_files
from coati_rl.model_files.config import quantization_method, read_config
from coati_rl.model_files.names import load_on_meta
from coati_rl.model_files.quiet import no_load_report
from coati_rl.model_files.stored import read_stored
from consumer.adapters.adapters import adapter_infos, check_tensors
from consumer.adapters.lm_head import untie_lm_head
from consumer.adapters.merge_proof import Proof, prove
from consumer.adapters.merged_files import MAX_FILE_BYTES, MergedTensors, write_settings, write_weights
from consumer.parallel.layout import Layout
from consumer.parallel.parameters import ParameterInfo, describe_parameters
from consumer.whole_directory import publish, weight_disk_errors


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """Hold what was written."""

    num_tensors: int
    num_files: int
    num_layers: int  # with an adapter
    proof: Proof


def merge_adapter(
    base: Path,
    adapter: Path,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    where: str,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Merged:
    """Write the model that an adapter makes of its base.

    Args:
        base: directory of the model that the adapter was trained on.
        adapter: its directory, in PEFT's format.
        out: directory that is written, which must not exist.
        dtype: of the written weights; None: that in which the base has each.
        where: what named the adapter, for messages.
        max_file_bytes: of weights in a file, unless one tensor is larger.
    Raises: ConfigError for an adapter that does not fit the base, or is lost by rounding; RunError if the disk fails,
        or what was written does not compute what the base with the adapter does.
    """
    if out.exists():
        raise ConfigError(f"{out}: exists; name a directory that does not, or remove it")
    if not is_adapter(adapter):
        raise ConfigError(f"{where}: holds no adapter; give a directory with adapter_config.json")
    found = read_adapter(adapter, where)
    check_base(adapter, base, where)
    infos, of_base, untied = _check_fit(base, found, where)
    tensors = MergedTensors(base, found, infos, of_base, dtype, where, copies=untied)
    partial = out.with_name(f".{out.name}.partial")
    with weight_disk_errors(out, "model"):
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            num_files = write_weights(partial, tensors, max_file_bytes)
            write_settings(partial, base, found, dtype, is_untied=bool(untied))
            proof = prove(partial, base, found, tensors.names, where=where)
            publish(partial, out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return Merged(num_tensors=len(tensors.metas), num_files=num_files, num_layers=len(tensors.factors), proof=proof)


def _check_fit(
    base: Path, adapter: AdapterDirectory, where: str
) -> tuple[tuple[ParameterInfo, ...], tuple[ParameterInfo, ...], Mapping[str, str]]:
    """Return an adapter's tensors, its base's parameters, and which one is made of which one; see `untie_lm_head`.

    Raises: ConfigError unless they are those of adapters of the base.
    """
    has_score, named = adapter.has_scalar_head, f"base {base}"
    if is_adapter(base):
        raise ConfigError(f"{named}: holds an adapter; give the model that both were trained on")
    check_model_files(base, "rated" if has_score else "scored", where=named)
    config = read_config(base, named)
    if (method := quantization_method(config)) is not None:
        raise ConfigError(f"{named}: is quantised ({method}), and weights cannot be added to it; use the plain model")
    config.num_labels = 1
    auto: Any = AutoModelForSequenceClassification if has_score else AutoModelForCausalLM
    stored = {name: each.meta for name, each in read_stored(base, named).items()}
    with no_load_report():  # a base lacks the scalar head
        model, _ = load_on_meta(auto.from_config, config, stored)
    _check_head(adapter, where, model)
    untied = {} if has_score else untie_lm_head(model, adapter.spec.targets)
    infos = describe_parameters(model, Layout(), [model.config.get_text_config().num_hidden_layers])
    try:
        factors = adapter_infos(model, infos, adapter.spec, takes_lm_head=not has_score)
    except ConfigError as error:
        raise ConfigError(f"{where}: does not fit the {named}: {str(error).partition(': ')[2]}") from error
    saved = {*adapter.spec.saved_modules, *(("score",) if has_score else ())}
    expected = (*factors, *(info for info in infos if is_saved_whole(info.name, saved)))
    check_tensors(adapter.directory, where, expected, model=f"the {named}")
    return expected, infos, untied


def _check_head(adapter: AdapterDirectory, where: str, model: PreTrainedModel) -> None:
    """Raise ConfigError for an adapter of the embedding, or one that replaces a head that is the embedding."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    for name, module in model.named_modules():
        is_target = module is embedding and any(f".{name}".endswith(f".{each}") for each in adapter.spec.targets)
        is_saved = module in (embedding, head) and is_saved_whole(f"{name}.weight", adapter.spec.saved_modules)
        if is_target or (is_tied and is_saved):
            tied = ": head and embedding are one tensor in this model" if is_tied else ""
            raise ConfigError(
                f"{where}: changes {name.rpartition('.')[2]}, which is not computed here{tied}; merge it with PEFT's "
                "merge_and_unload"
            )
