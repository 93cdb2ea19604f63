"""Read the adapter of --adapter, which decides rank, scale and layers; warn of adapters that PEFT would not read."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from coati_rl.checkpoint.saved_adapter import adapter_fields
from coati_rl.config.config import Config
from coati_rl.config.fields import shown, spelling
from coati_rl.config.lora import LoraConfig
from coati_rl.config.model import ROUTED
from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError
from coati_rl.memory.adapters import adapter_shape
from coati_rl.model_files.adapter_files import AdapterSpec, read_adapter

Job = TypeVar("Job", bound=TrainingConfig)
_OF_EXPERTS = frozenset({"down_proj", "gate_proj", "up_proj"})  # names that dense layers beside experts have, too


def with_adapter(config: Job) -> Job:
    """Return the config with the rank, scale and layers of --adapter, if it is given.

    Raises: ConfigError if it cannot be read, or flags say something else; without the package of --load-in-4bit.
    """
    lora = config.lora
    if lora.load_in_4bit and find_spec("bitsandbytes") is None:
        raise ConfigError(
            "--load-in-4bit: the package bitsandbytes is not installed; install it (ColossalAI depends on it), or "
            "leave the flag out"
        )
    if lora.adapter is None:
        return config
    directory = Path(lora.adapter).expanduser().absolute()
    where = f"--adapter {lora.adapter}"
    found = read_adapter(directory, where)
    if any("lm_head." in name for name in found.shapes) and (reasons := [*_refusals_of_head(config, found.spec)]):
        raise ConfigError(
            f"{where}: adapts the LM head, too, and is not trained with {', '.join(reasons)}; merge it into its base "
            "(coati-rl merge), and give that as --model"
        )
    values = adapter_fields(found.spec)
    others = [
        f"{spelling(name, LoraConfig.model_fields[name])} {shown(getattr(lora, name))}, and it has {shown(value)}"
        for name, value in values.items()
        if name in lora.model_fields_set and getattr(lora, name) not in (None, value)
    ]
    if others:
        raise ConfigError(f"{where}: {'; '.join(others)}; leave the flag out, or start a new adapter without --adapter")
    return config.with_changes(adapter=str(directory), **values)


def adapter_warnings(config: TrainingConfig, hf_config: Any) -> list[str]:
    """Warn of adapters of dense layers that PEFT, by the type of the mixture, takes for adapters of its experts."""
    lora, model_type = config.lora, hf_config.model_type
    if not lora.is_on or model_type not in ROUTED - {"qwen2_moe"}:
        return []
    layers = adapter_shape(hf_config, lora.spec).names
    if layers.isdisjoint(_OF_EXPERTS):
        return []
    return [
        f"--lora-targets {shown(lora.lora_targets)}: PEFT takes {', '.join(sorted(layers & _OF_EXPERTS))} of a "
        f"{model_type} for layers of its experts, and does not read such adapters, which coati-rl merge does; without "
        f"them it does: --lora-targets {','.join(sorted(layers - _OF_EXPERTS))}"
    ]


def _refusals_of_head(config: TrainingConfig, spec: AdapterSpec) -> Iterator[str]:
    """Yield what an adapter of the LM head is not trained with."""
    parallel, lora = config.parallel, config.lora
    if isinstance(config, Config) and config.algorithm.has_critic:
        yield "a critic"
    if parallel.num_trainers > 1:
        yield f"-t {parallel.num_trainers}"
    if parallel.plugin == "fsdp2":
        yield "--plugin fsdp2"
    if lora.load_in_4bit:
        yield "--load-in-4bit"
    if lora.lora_sync == "adapter":
        yield "--lora-sync adapter"
    if spec.dropout or lora.lora_dropout:
        yield "--lora-dropout"
