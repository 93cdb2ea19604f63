"""Write and read checkpoints: a Hugging Face model directory with the optimizer's tensors, state and manifest.

A checkpoint appears under its name complete or not at all: everything is written into a hidden sibling directory,
flushed to the disk and renamed. Tensors are saved unsharded, so `AutoModelForCausalLM.from_pretrained` and every layout
of trainers can read it. The data-parallel ranks of a pipeline stage share out its files, and each digests what it has
written from memory; all ranks share one file system.
"""

import copy
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from coati_rl.checkpoint.directory import prune, role_directory, write_manifest, write_state
from coati_rl.checkpoint.saved_adapter import WEIGHTS_KEY, recorded_weights
from coati_rl.checkpoint.tokenizer_files import write_files
from coati_rl.disk import flush
from coati_rl.errors import ConfigError
from coati_rl.model_files.adapter_files import PREFIX, WEIGHTS_FILE, write_adapter_config
from coati_rl.model_files.saving import write_settings
from coati_rl.model_files.stored_views import StoredParameter
from coati_rl.tensor_bytes import bytes_of
from consumer.optim.optimizer_state import MASTER
from consumer.parallel.parameters import ParameterInfo
from consumer.whole_directory import publish, weight_disk_errors

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 2**29  # of weights per file, shared out by ranks; their optimizer state goes to another file


class CheckpointWriter:
    """Write one checkpoint; several processes may write its files, one of them begins and publishes it."""

    def __init__(
        self,
        directory: Path,
        infos: Sequence[ParameterInfo],
        *,
        dtype: torch.dtype,
        max_file_bytes: int = MAX_FILE_BYTES,
        nested_partial: Path | None = None,
        peft: Mapping[str, Any] | None = None,
        has_optimizer: bool = True,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Assign parameters to files.

        Args:
            directory: the finished checkpoint's path.
            infos: all parameters of the model.
            dtype: of the saved weights.
            max_file_bytes: bytes of weights per file, unless one tensor is larger.
            nested_partial: where another checkpoint's writer keeps it until it publishes both; None: a sibling.
            peft: contents of adapter_config.json, of a directory that holds adapters; None: it holds a model.
            has_optimizer: the states of optimizers are written, too.
            buffers: what the model's files hold besides parameters, by name; it is in the first file.
        """
        self.directory = directory
        self._infos = infos
        self._dtype = dtype
        self._partial = nested_partial or directory.with_name(f".{directory.name}.partial")
        self._is_nested = nested_partial is not None
        self._peft = peft
        self._buffers = dict(buffers or {}) if peft is None else {}
        self.has_optimizer = has_optimizer
        self.files = cut_into_files(infos, dtype.itemsize, max_file_bytes)  # names of parameters, file by file

    def nested(
        self,
        role: str,
        infos: Sequence[ParameterInfo],
        peft: Mapping[str, Any] | None,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> "CheckpointWriter":
        """Return the writer of another model of the same checkpoint, in a directory of its own."""
        directory, partial = role_directory(self.directory, role), role_directory(self._partial, role)
        return CheckpointWriter(
            directory,
            infos,
            dtype=self._dtype,
            nested_partial=partial,
            peft=peft,
            has_optimizer=self.has_optimizer,
            buffers=buffers,
        )

    def begin(self) -> None:
        """Create an empty partial directory. Raises: RunError on a disk error, as do the other methods."""
        with weight_disk_errors(self.directory):
            if self._is_nested:
                self._partial.mkdir()
                return
            for left_over in self.directory.parent.glob(".step-*.partial"):  # left by a killed run
                shutil.rmtree(left_over)
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)

    def write(
        self, number: int, weights: Mapping[str, Tensor], optimizer_tensors: Mapping[str, Tensor] | None
    ) -> dict[str, str]:
        """Write file `number` of `files`: the checkpoint's tensors by name, and full optimizer tensors, if any.

        An optimizer's tensors have the names of parameters, kind/name: it updates joined experts as one.

        Returns: the digests of the files by name.
        """
        with weight_disk_errors(self.directory):
            model, optimizer = self._file_name("model", number), self._file_name("optimizer", number)
            prefix = "" if self._peft is None else PREFIX
            saved = {f"{prefix}{name}": weight for name, weight in weights.items()}
            if number == 0:
                saved |= self._buffers
            digests = {model: self._save(saved, model, {"format": "pt"})}
            if optimizer_tensors is not None:
                digests[optimizer] = self._save(optimizer_tensors, optimizer, None)
            return digests

    def publish(
        self,
        *,
        model: PreTrainedModel,
        settings_dir: Path,
        state: Mapping[str, Any],
        keep: int | None,
        files: Mapping[str, bytes] | None = None,
        digests: Mapping[str, str] | None = None,
    ) -> None:
        """Add the files that are written once and rename the directory; an existing checkpoint is replaced.

        Args:
            model: its configuration is saved.
            settings_dir: of a model, whose settings that transformers refuses to write are copied from here.
            state: the remaining state that a resume needs, written as JSON.
            files: further files, by name: the tokenizer's among them.
            digests: of files, by name; others are read to be digested.
            keep: number of checkpoints to keep in the parent directory, this one included; None: all.
        """
        self.describe(model, settings_dir, files or {})
        with weight_disk_errors(self.directory):
            if (weights := state.get(WEIGHTS_KEY)) is not None:  # the base's identity; its own is that of the files
                state = {**state, WEIGHTS_KEY: recorded_weights(self._partial, weights["base"])}
            write_state(self._partial, state)
            write_manifest(self._partial, digests or {})
            publish(self._partial, self.directory)
            if keep is not None:
                prune(self.directory.parent, keep)

    def describe(self, model: PreTrainedModel, settings_dir: Path, files: Mapping[str, bytes]) -> None:
        """Write the model's configuration, which file holds which weight, and further files; see `publish`.

        Of adapters PEFT reads one file, into which those of all ranks go.
        """
        with weight_disk_errors(self.directory):
            if self._peft is not None:
                write_adapter_config(self._partial, self._peft)
                self._join_adapters()
                write_files(self._partial, files)
                return
            config = copy.deepcopy(model.config)
            # transformers removes this prefix, too, when it saves: FSDP2 derives a class of that name from the model's.
            config.dtype, config.architectures = self._dtype, [type(model).__name__.removeprefix("FSDP")]
            generation = model.generation_config if model.can_generate() else None
            for line in write_settings(self._partial, config, generation, settings_dir):
                logger.warning("%s: %s", self.directory, line)
            self._write_index()
            write_files(self._partial, files)

    def _save(self, tensors: Mapping[str, Tensor], name: str, metadata: dict[str, str] | None) -> str:
        # contiguous() copies where needed: safetensors refuses tensors that share memory or are views.
        saved = {key: tensor.contiguous() for key, tensor in tensors.items()}
        save_file(saved, self._partial / name, metadata)
        flush(self._partial / name)
        return _digest_of_saved(self._partial / name, saved)

    def _write_index(self) -> None:
        """Write which file holds each weight; vLLM reads all safetensors of a directory that has no index."""
        saved = {info.name: info.saved for info in self._infos}
        of_buffers = sum(each.nbytes for each in self._buffers.values())
        of_weights = sum(prod(info.shape) for info in self._infos) * self._dtype.itemsize
        index = {
            "metadata": {"total_size": of_weights + of_buffers},
            "weight_map": {
                stored: self._file_name("model", number)
                for number, names in enumerate(self.files)
                for name in names
                for stored, _ in saved[name].entries()
            }
            | dict.fromkeys(self._buffers, self._file_name("model", 0)),
        }
        (self._partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _join_adapters(self) -> None:
        if len(self.files) == 1:
            return
        parts = [self._partial / self._file_name("model", number) for number in range(len(self.files))]
        tensors = {name: tensor for part in parts for name, tensor in load_file(part).items()}
        self._save(tensors, WEIGHTS_FILE, {"format": "pt"})
        for part in parts:
            part.unlink()

    def _file_name(self, kind: str, number: int) -> str:
        total = len(self.files)
        kind = "adapter_model" if kind == "model" and self._peft is not None else kind
        return f"{kind}.safetensors" if total == 1 else f"{kind}-{number + 1:05d}-of-{total:05d}.safetensors"


class CheckpointReader:
    """Read the tensors of a checkpoint one at a time."""

    def __init__(self, directory: Path) -> None:
        """Open the files. Raises: ConfigError if they cannot be read."""
        self.directory = directory
        paths = sorted(directory.glob("*.safetensors"))
        # Of an optimizer that has taken no step, as where all groups were dropped, they may be without a tensor.
        self.has_optimizer_files = any(path.name.startswith("optimizer") for path in paths)
        try:
            self._files = [safe_open(path, "pt") for path in paths]
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{directory} is not a checkpoint to resume from: {error}") from error
        self._where = {
            key.removeprefix(PREFIX): (file, key)
            for file in self._files
            for key in file.keys()  # noqa: SIM118, not a mapping
        }
        self.kinds = frozenset(key.partition("/")[0] for key in self._where if "/" in key)  # of optimizer tensors

    def get(self, kind: str, parameter: StoredParameter) -> Tensor | None:
        """Return a full tensor on the CPU, None if it was not saved; a missing `master` is the saved weight itself.

        Raises: ConfigError if the checkpoint lacks the parameter: it belongs to another model.
        """
        missing = next((name for name, _ in parameter.entries() if name not in self._where), None)
        if missing is not None:
            raise ConfigError(f"the checkpoint belongs to another model: it has no {missing}")
        key = f"{kind}/{parameter.name}"
        if key not in self._where:
            return parameter.join(self._read) if kind == MASTER else None
        return self._read(key)

    def _read(self, key: str) -> Tensor:
        file, stored = self._where[key]
        tensor: Tensor = file.get_tensor(stored)
        return tensor


def taken(writing: set[Future[dict[str, str]]]) -> dict[str, str]:
    """Remove the futures and return what they have returned."""
    return writing.pop().result() if writing else {}


def keep(tensors: dict[str, Tensor], key: str, full: Tensor, *, is_own: bool) -> None:
    """Store a tensor of a rank's own file on the CPU."""
    if is_own:
        tensors[key] = full.cpu()


def _digest_of_saved(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of a safetensors file that holds these, from its header and their bytes in memory.

    The file is not read back, which may be slow where it is on another machine's disk.
    """
    with path.open("rb") as file:
        size = file.read(8)
        header = file.read(int.from_bytes(size, "little"))
    hasher = xxhash.xxh3_128(size + header)
    places = {name: entry["data_offsets"] for name, entry in json.loads(header).items() if name in tensors}
    for name in sorted(places, key=places.__getitem__):
        hasher.update(bytes_of(tensors[name].detach().contiguous()))
    return str(hasher.hexdigest())


def cut_into_files(infos: Sequence[ParameterInfo], itemsize: int, max_bytes: int) -> list[list[str]]:
    """Group consecutive parameters of one pipeline stage up to `max_bytes`; a larger one gets a file of its own."""
    files: list[list[str]] = []
    size, stage = 0, -1
    for info in infos:
        num_bytes = prod(info.shape) * itemsize
        if info.stage != stage or size + num_bytes > max_bytes:
            files.append([])
            size, stage = 0, info.stage
        files[-1].append(info.name)
        size += num_bytes
    return files
