"""Read and write the directory of a LoRA adapter in PEFT's format: adapter_config.json, adapter_model.safetensors.

Settings of PEFT that are computed in another way here are refused by name: an adapter that was read without them would
be another one.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from coati_rl.errors import ConfigError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of a parameter's name in the file of weights
ALL_LINEAR = "all-linear"  # PEFT's word for every linear layer but the head

# What an adapter of this project is, whatever PEFT's version: other values mean other arithmetic, or other layers.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
    "layers_pattern": (None, []),
    "exclude_modules": (None, []),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "alora_invocation_tokens": (None, []),
    # Others, PiSSA and OLoRA among them, begin by changing the base's weights, which the files do not hold.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva", "mica"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSpec:
    """Describe the adapters of a model: weight + scale * B @ A in place of the weight of each targeted layer."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # layers' names or what these end with, as in PEFT; or ("all-linear",)
    dropout: float = 0.0  # of the input of A, in training
    is_rank_stabilised: bool = False  # rsLoRA, arXiv:2312.03732
    saved_modules: tuple[str, ...] = ()  # trained in full beside the adapters (PEFT's modules_to_save)

    @property
    def scale(self) -> float:
        """Return the factor of B @ A."""
        return self.alpha / (self.rank**0.5 if self.is_rank_stabilised else self.rank)

    def as_peft(self, *, base: str, has_scalar_head: bool, targets: tuple[str, ...]) -> dict[str, Any]:
        """Return the contents of adapter_config.json.

        Args:
            base: directory or hub id of the model that the adapters are of.
            has_scalar_head: of the model.
            targets: names of the adapted layers, or what these end with.
        """
        return {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS" if has_scalar_head else "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,
            "lora_dropout": self.dropout,
            "use_rslora": self.is_rank_stabilised,
            "target_modules": sorted(targets),
            "modules_to_save": sorted(self.saved_modules) or None,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterDirectory:
    """Hold what an adapter's directory says of it."""

    directory: Path
    spec: AdapterSpec
    base: str  # the model that it was trained on, as written there; empty if it does not say
    has_scalar_head: bool = False  # which it holds, too
    shapes: Mapping[str, tuple[int, ...]]  # of its tensors, by the parameter's name in this project


def is_adapter(directory: Path) -> bool:
    """Return True of a directory that holds an adapter in place of a model."""
    return (directory / CONFIG_FILE).is_file()


def write_adapter_config(directory: Path, peft: Mapping[str, Any]) -> None:
    """Write the settings of an adapter; see `AdapterSpec.as_peft`."""
    (directory / CONFIG_FILE).write_text(json.dumps(peft, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_adapter(directory: Path, where: str) -> AdapterDirectory:
    """Read an adapter's settings and the names of its tensors.

    Args:
        directory: of the adapter.
        where: flag and value, for messages.
    Raises: ConfigError if it cannot be read, or is of a kind that is not computed here.
    """
    try:
        config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG_FILE} holds no object")
        spec = _spec_of(config, where)
        with safe_open(directory / WEIGHTS_FILE, "pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118, no mapping
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(
            f"{where}: is no LoRA adapter that can be read: {error}; give a directory with {CONFIG_FILE} and "
            f"{WEIGHTS_FILE}, as PEFT and this project's checkpoints have"
        ) from error
    return AdapterDirectory(
        directory=directory,
        spec=spec,
        base=str(config.get("base_model_name_or_path") or ""),
        has_scalar_head=config.get("task_type") == "SEQ_CLS",
        shapes={name.removeprefix(PREFIX): shape for name, shape in shapes.items()},
    )


def _spec_of(config: Mapping[str, Any], where: str) -> AdapterSpec:
    others = [f"{key} {config[key]!r}" for key, plain in _PLAIN.items() if key in config and config[key] not in plain]
    if others:
        raise ConfigError(
            f"{where}: has {', '.join(others)}, which is not computed here; merge it into its base with PEFT's "
            "merge_and_unload, and give that as --model"
        )
    targets = config["target_modules"]
    if isinstance(targets, str) and targets != ALL_LINEAR:
        raise ConfigError(f"{where}: target_modules {targets!r} is a pattern; list the layers' names")
    return AdapterSpec(
        rank=int(config["r"]),
        alpha=float(config["lora_alpha"]),
        targets=(targets,) if isinstance(targets, str) else tuple(sorted(targets)),
        dropout=float(config.get("lora_dropout") or 0.0),
        is_rank_stabilised=bool(config.get("use_rslora")),
        saved_modules=tuple(sorted(config.get("modules_to_save") or ())),
    )
