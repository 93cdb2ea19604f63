"""Find the linear layers of a model that adapters are added to, and name what an adapter of them holds.

Trainers and engines must mean the same layers by "all-linear", and by the last parts of names; hence one function.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.model_files.adapter_files import ALL_LINEAR, PREFIX, AdapterSpec

A, B = FACTORS = "lora_A", "lora_B"
_MAX_NAMED = 3  # targets in a message


def adapted_layers(
    model: Any, targets: Sequence[str], *, head: Any = None, takes_lm_head: bool = False
) -> dict[str, tuple[int, int]]:
    """Return the sizes of adapted layers, out and in, by name, in the model's order.

    Args:
        model: of transformers; torch's meta device is enough.
        targets: layers' names or what these end with, as in PEFT; or ("all-linear",).
        head: scalar head, which takes none.
        takes_lm_head: the LM head takes one, if a target names it; "all-linear" does not.
    Raises: ConfigError if a target is no linear layer of the model.
    """
    from torch import nn

    heads = {id(head)}
    if not takes_lm_head or tuple(targets) == (ALL_LINEAR,):
        heads.add(id(model.get_output_embeddings()))
    linear = {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) not in heads
    }
    if tuple(targets) == (ALL_LINEAR,):
        return linear
    of_target = {target: [name for name in linear if f".{name}".endswith(f".{target}")] for target in targets}
    if missing := [target for target, names in of_target.items() if not names]:
        more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        raise ConfigError(
            f"--lora-targets {','.join(missing[:_MAX_NAMED])}{more}: no linear layer of {type(model).__name__} that "
            f"takes an adapter; it has {', '.join(dict.fromkeys(name.rpartition('.')[2] for name in linear))}"
        )
    wanted = {name for names in of_target.values() for name in names}
    found = {name: size for name, size in linear.items() if name in wanted}
    return found


def layers_of_directory(directory: Path, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Do the same for a language model's directory, of which config.json alone is read."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    return adapted_layers(model, targets)


def last_parts(layers: Mapping[str, object]) -> set[str]:
    """Return the last parts of layers' names."""
    return {name.rpartition(".")[2] for name in layers}


def is_saved_whole(parameter: str, modules: Iterable[str]) -> bool:
    """Return True if a parameter is in one of PEFT's modules_to_save: of modules whose names end so, as text."""
    parts, ends = parameter.split(".")[:-1], tuple(modules)
    return any(".".join(parts[: number + 1]).endswith(ends) for number in range(len(parts)))


def peft_shapes(layers: Mapping[str, tuple[int, int]], spec: AdapterSpec) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the names and shapes of an adapter's tensors, as PEFT's files have them."""
    for name, (out_size, in_size) in layers.items():
        yield f"{PREFIX}{name}.{A}.weight", (spec.rank, in_size)
        yield f"{PREFIX}{name}.{B}.weight", (out_size, spec.rank)
