"""Compare the adapter of a checkpoint with that of the run that goes on from it."""

from pathlib import Path

from coati_rl.checkpoint.directory import load_state
from coati_rl.config.fields import shown
from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError
from coati_rl.model_files.adapter_files import AdapterSpec, is_adapter, read_adapter

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


def adapter_fields(spec: AdapterSpec) -> dict[str, object]:
    """Return what decides an adapter's arithmetic, by field; dropout may differ."""
    return {
        "lora_rank": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_targets": spec.targets,
        "use_rslora": spec.is_rank_stabilised,
    }
