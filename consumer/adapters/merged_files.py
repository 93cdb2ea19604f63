"""Write the files of a model with a merged adapter: weights tensor by tensor, settings and tokenizer."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from coati_rl.checkpoint.tokenizer_files import (
    OF_PROCESSOR,
    OLD_TEMPLATE_FILE,
    TEMPLATE_FILE,
    is_template,
    read_tokenizer_files,
    write_files,
)
from coati_rl.disk import flush
from coati_rl.errors import ConfigError
from coati_rl.model_files.adapted_layers import FACTORS
from coati_rl.model_files.adapter_files import PREFIX, WEIGHTS_FILE, AdapterDirectory
from coati_rl.model_files.saving import CONFIG, GENERATION
from coati_rl.model_files.stored import read_stored, tensors_of
from coati_rl.model_files.values import HEAD
from coati_rl.preflight.resources import read_tokenizer
from coati_rl.reading.reward_samples import padding_token_id
from consumer.adapters.adapters import BASE_WEIGHT, read_start, with_product
from consumer.parallel.parameters import ParameterInfo

MAX_FILE_BYTES = 2**29  # of weights, as in checkpoints
_INDEX = "model.safetensors.index.json"
_TOKENIZERS = frozenset({"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json"})


class MergedTensors:
    """Give the tensors of the merged model, one at a time."""

    def __init__(
        self,
        base: Path,
        adapter: AdapterDirectory,
        infos: Sequence[ParameterInfo],
        of_base: Sequence[ParameterInfo],
        dtype: torch.dtype | None,
        where: str,
        copies: Mapping[str, str],
    ) -> None:
        """Read the adapter, and what the base has.

        Args:
            base: directory of the model.
            adapter: of it.
            infos: the adapter's tensors.
            of_base: the base's parameters, of a model that knows the names in its files.
            dtype: of all floating-point tensors; None: that of the base's files.
            where: what named the adapter, for messages.
            copies: the parameter that another one is made of, where the base's files do not have it, by its name.
        Raises: ConfigError if files are damaged, or lack a weight that the adapter changes.
        """
        self._scale, self._where = adapter.spec.scale, f"base {base}"
        self._stored = read_stored(base, self._where)
        if adapter.has_scalar_head:
            self._stored = {name: each for name, each in self._stored.items() if not name.endswith(HEAD)}
        held = {info.name: info.saved for info in of_base}
        # Of files' tensors, or their first parts, by parameter.
        self.names = {name: next(saved.entries())[0] for name, saved in held.items()}
        copied = {self.names[name]: self.names[each] for name, each in copies.items()}
        self._sources = {name: each for name, each in copied.items() if name not in self._stored}
        self._stored |= {name: self._stored[each] for name, each in self._sources.items() if each in self._stored}
        tensors = read_start(adapter.directory, infos)
        end = f".{FACTORS[0]}.weight"
        layers = [name.removesuffix(end) for name in tensors if name.endswith(end)]
        self.factors = {  # by the weight's name in the base's files
            self.names[f"{layer}.weight"]: tuple(tensors.pop(f"{layer}.{factor}.weight") for factor in FACTORS)
            for layer in layers
        }
        # Trained in full, in place of the base's or, like a scalar head, beside them.
        self._whole = {key: part for name, each in tensors.items() for key, part in held[name].split(each)}
        if missing := [name for name in self.factors if name not in self._stored]:
            raise ConfigError(
                f"{where}: changes {missing[0]}, which the files of the base {base} do not have; save the base with "
                "transformers' save_pretrained"
            )
        self._check_base_weights(adapter, where)
        found = [each.meta.dtype for each in self._stored.values() if each.meta.is_floating_point()]
        usual = max(found, key=found.count)
        metas = {name: each.meta for name, each in self._stored.items()}
        metas |= {name: each.to("meta", usual) for name, each in self._whole.items() if name not in metas}
        self.metas = {  # what is written, by name
            name: each.to(dtype) if dtype is not None and each.is_floating_point() else each
            for name, each in metas.items()
        }

    def _check_base_weights(self, adapter: AdapterDirectory, where: str) -> None:
        """Raise ConfigError if the adapter holds a weight of the base that is not the one of its files."""
        with safe_open(adapter.directory / WEIGHTS_FILE, "pt") as file:
            for name in (each for each in adapter.shapes if each.endswith(BASE_WEIGHT)):
                layer = self.names[f"{name.removesuffix(BASE_WEIGHT)}.weight"]
                with tensors_of(self._stored[layer].file, self._where) as opened:
                    own = opened.get_tensor(self._sources.get(layer, layer))
                if not torch.equal(file.get_tensor(f"{PREFIX}{name}").to(own.dtype), own):
                    raise ConfigError(
                        f"{where}: holds another {layer} than the {self._where}; give the base it was trained on"
                    )

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return some of the tensors by name."""
        found = dict[str, Tensor]()
        with ExitStack() as stack:
            files = dict.fromkeys(self._stored[name].file for name in names if name in self._stored)
            opened = {file: stack.enter_context(tensors_of(file, self._where)) for file in files}
            for name in names:
                weight = self._whole.get(name)
                if weight is None:
                    weight = opened[self._stored[name].file].get_tensor(self._sources.get(name, name))
                found[name] = self._merged(name, weight)
        return found

    def _merged(self, name: str, weight: Tensor) -> Tensor:
        dtype, factors = self.metas[name].dtype, self.factors.get(name)
        if factors is None:
            return weight.to(dtype)
        return with_product(weight, *factors, scale=self._scale, dtype=dtype)


def write_weights(directory: Path, tensors: MergedTensors, max_file_bytes: int) -> int:
    """Write the files of weights and their index. Returns: the number of files."""
    parts = [*_parts(tensors.metas, max_file_bytes)]
    weight_map = dict[str, str]()
    for number, names in enumerate(parts, 1):
        file = "model.safetensors" if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        content = {name: tensor.contiguous() for name, tensor in tensors.read(names).items()}
        save_file(content, directory / file, {"format": "pt"})
        flush(directory / file)
        weight_map |= dict.fromkeys(names, file)
    total = sum(each.nbytes for each in tensors.metas.values())
    _write_json(directory / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return len(parts)


def write_settings(
    directory: Path, base: Path, adapter: AdapterDirectory, dtype: torch.dtype | None, *, is_untied: bool
) -> None:
    """Write config.json, generation_config.json and the tokenizer, all as the base has them.

    A tokenizer or chat template that the adapter's directory has goes before the base's. `dtype`: as of
    `MergedTensors`. `is_untied`: the head has a weight of its own now.
    """
    write_files(directory, _tokenizer_files(base, adapter.directory))
    config = json.loads((base / CONFIG).read_text(encoding="utf-8"))
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
    if is_untied:
        for each in filter(None, (config, config.get("text_config"))):
            each["tie_word_embeddings"] = False
    if adapter.has_scalar_head:
        config |= _classifier_settings(directory, base)
    elif (base / GENERATION).is_file():
        (directory / GENERATION).write_bytes((base / GENERATION).read_bytes())
    _write_json(directory / CONFIG, config)


def _tokenizer_files(base: Path, adapter: Path) -> dict[str, bytes]:
    files, own = read_tokenizer_files(base), read_tokenizer_files(adapter)
    if _TOKENIZERS & own.keys():
        return {name: each for name, each in files.items() if name.endswith(OF_PROCESSOR)} | own
    if TEMPLATE_FILE in own:
        files.pop(OLD_TEMPLATE_FILE, None)
    return files | {name: each for name, each in own.items() if is_template(name)}


def _classifier_settings(directory: Path, base: Path) -> dict[str, Any]:
    """Return what config.json has of a classifier of one label; the tokenizer is in `directory`."""
    config = AutoConfig.from_pretrained(base, trust_remote_code=False)
    kind: Any = AutoModelForSequenceClassification._model_mapping[type(config)]
    text, eos = config.get_text_config(), config.get_text_config().eos_token_id
    pad = text.pad_token_id if text.pad_token_id is not None else eos[0] if isinstance(eos, list) else eos
    if _TOKENIZERS & {path.name for path in directory.iterdir()}:
        pad = padding_token_id(read_tokenizer(directory, "ADAPTER"))
    if pad is None:
        raise ConfigError(
            f"base {base}: names neither a padding nor an end-of-sequence token, and transformers finds a sequence's "
            "score by its padding; set pad_token_id in config.json"
        )
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {"architectures": [kind.__name__], "pad_token_id": pad, **labels}


def _parts(metas: Mapping[str, Tensor], max_bytes: int) -> Iterator[list[str]]:
    """Cut names into parts of at most `max_bytes`; a larger tensor gets one of its own."""
    part, size = list[str](), 0
    for name, meta in metas.items():
        if part and size + meta.nbytes > max_bytes:
            yield part
            part, size = [], 0
        part.append(name)
        size += meta.nbytes
    yield part


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
