"""Write and read a model's adapters: PEFT's files, its base's identity, and the state of Adam.

adapter_config.json, adapter_model.safetensors   as PEFT has them, and `--adapter` reads them
state.json                                       "weights": {"base": identity}, "tinker": {"step"}
adam.safetensors                                 KIND/NAME of each factor; only with the optimizer, after a step
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from coati_rl.checkpoint.directory import STATE_FILE
from coati_rl.checkpoint.format import FORMAT_VERSION, VERSION_KEY
from coati_rl.checkpoint.saved_adapter import WEIGHTS_KEY
from coati_rl.model_files.adapter_files import PREFIX, WEIGHTS_FILE, write_adapter_config
from consumer.tenants.adapter_set import MOMENTS
from consumer.whole_directory import publish, weight_disk_errors

STATE_KEY = "tinker"
_MOMENTS_FILE = "adam.safetensors"


def write_adapters(
    directory: Path,
    tensors: Mapping[str, Tensor],
    *,
    peft: Mapping[str, Any],
    base: str,
    num_steps: int,
    with_optimizer: bool,
) -> None:
    """Write a checkpoint, which appears complete or not at all.

    Args:
        directory: of the checkpoint; one that is there is replaced.
        tensors: of `AdapterSet.full`.
        peft: contents of adapter_config.json.
        base: identity of the base.
        num_steps: optimizer steps taken.
        with_optimizer: a load can go on with Adam's state.
    Raises: RunError if it cannot be written.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    moments = {name: each for name, each in tensors.items() if "/" in name}
    factors = {f"{PREFIX}{name}": each.contiguous() for name, each in tensors.items() if "/" not in name}
    state: dict[str, Any] = {VERSION_KEY: FORMAT_VERSION, WEIGHTS_KEY: {"base": base}, STATE_KEY: {}}
    if with_optimizer:
        state[STATE_KEY] = {"step": num_steps}
    with weight_disk_errors(directory):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_adapter_config(partial, peft)
        save_file(factors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        if moments:
            save_file(moments, partial / _MOMENTS_FILE)
        (partial / STATE_FILE).write_text(json.dumps(state) + "\n", encoding="utf-8")
        publish(partial, directory)


def read_moments(directory: Path) -> tuple[int, dict[str, Tensor]] | None:
    """Return the steps that Adam has taken and its moments, none before the first; None if it was not saved."""
    try:
        state = json.loads((directory / STATE_FILE).read_text(encoding="utf-8")).get(STATE_KEY, {})
    except (OSError, ValueError):
        return None
    if "step" not in state:
        return None
    moments = load_file(directory / _MOMENTS_FILE) if state["step"] else {}
    return int(state["step"]), moments


def layers_of(directory: Path) -> list[str]:
    """Return the names of the layers that an adapter's directory has factors of."""
    with safe_open(directory / WEIGHTS_FILE, "pt") as file:
        names = [name.removeprefix(PREFIX) for name in file.keys()]  # noqa: SIM118, no mapping
    return sorted({name.removesuffix(".lora_A.weight") for name in names if name.endswith(".lora_A.weight")})


def expected_moments(names: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the moments of factors."""
    return {f"{kind}/{name}" for kind in MOMENTS for name in names}
