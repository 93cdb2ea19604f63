"""Compare the adapter of a checkpoint with that of the run that goes on from it, and name the weights of both.

A checkpoint of adapters has "weights" in its state.json: {"base": the base's identity, "identity": its own}, see
`coati_rl.model_files.identity`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coati_rl.checkpoint.directory import STATE_FILE, load_state
from coati_rl.config.fields import shown
from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError
from coati_rl.model_files.adapter_files import AdapterSpec, is_adapter, read_adapter

WEIGHTS_KEY = "weights"  # of a checkpoint's state

FOUR_BITS_KEY = "load_in_4bit"  # of a checkpoint's state: whether its adapter's base had 4 bits; absent if not


def check_saved_adapter(config: TrainingConfig, directory: Path) -> None:
    """Raise ConfigError unless a checkpoint has adapters exactly if the run trains some, and of the same kind."""
    where = f"--checkpoint-path {directory}"
    if is_adapter(directory) != config.lora.is_on:
        what = "holds the whole model" if config.lora.is_on else "holds an adapter"
        remedy = "leave --lora-rank out" if config.lora.is_on else "give that run's --lora-rank"
        raise ConfigError(f"{where}: {what}; {remedy}, or start from its weights with --model or --adapter")
    if not config.lora.is_on:
        return
    there, here = adapter_fields(read_adapter(directory, where).spec), adapter_fields(config.lora.spec)
    if config.lora.lora_targets == ("all-linear",):
        del here["lora_targets"]  # there they are by name
    others = [
        f"{name} {shown(there[name])} instead of {shown(here[name])}" for name in here if there[name] != here[name]
    ]
    if others:
        raise ConfigError(f"{where}: its adapter has {', '.join(others)}; use the flags of that run")
    had_four_bits = bool(load_state(directory).get(FOUR_BITS_KEY))
    if had_four_bits != config.lora.load_in_4bit:
        what, remedy = ("in 4 bits", "give") if had_four_bits else ("as its files are", "leave out")
        raise ConfigError(
            f"{where}: its adapter was trained with the model {what}; {remedy} --load-in-4bit, or start from it with "
            "--adapter"
        )
    check_base(directory, Path(config.model.model), where)


def recorded_weights(directory: Path, base: str) -> dict[str, str]:
    """Return what the state of an adapter's checkpoint says of weights. `base`: the base's identity."""
    from coati_rl.model_files.identity import adapter_identity  # imports torch

    return {"base": base, "identity": adapter_identity(directory, base)}


def recorded_base(directory: Path) -> str | None:
    """Return the identity of the base that an adapter was trained on; None if its directory does not say."""
    if not (directory / STATE_FILE).is_file():
        return None
    try:
        weights: Any = load_state(directory).get(WEIGHTS_KEY)
    except ValueError:  # which is reported when the whole checkpoint is read
        return None
    base = weights.get("base") if isinstance(weights, Mapping) else None
    return base if isinstance(base, str) else None


def check_base(adapter: Path, base: Path, where: str) -> None:
    """Raise ConfigError if an adapter's directory names another base than this one.

    Args:
        adapter: its directory.
        base: of the model; one without weights yet is not compared.
        where: flag and value of the adapter, for messages.
    """
    from coati_rl.model_files.identity import model_identity  # imports torch
    from coati_rl.model_files.stored import has_weights

    recorded = recorded_base(adapter)
    if recorded is None or not base.is_dir() or not has_weights(base):
        return
    found = model_identity(base)
    if found != recorded:
        raise ConfigError(
            f"{where}: is an adapter of another base, whose weights are {recorded}, and those of {base} are {found}; "
            "give the model that it was trained on (coati-rl weights DIRECTORY prints them)"
        )


def adapter_fields(spec: AdapterSpec) -> dict[str, object]:
    """Return what decides an adapter's arithmetic, by field; dropout may differ."""
    return {
        "lora_rank": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_targets": spec.targets,
        "use_rslora": spec.is_rank_stabilised,
    }
