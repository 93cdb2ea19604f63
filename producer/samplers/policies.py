"""Hold one base model and the adapters of policies, one of which a forward pass computes with.

An adapter's part is added to a layer's output by a hook, on the LM head too; a policy of whole weights is a model of
its own. In: directories of PEFT's or Hugging Face's format. N rows of a layer's input.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from coati_rl.errors import ConfigError
from coati_rl.model_files.adapter_files import PREFIX, WEIGHTS_FILE, is_adapter, read_adapter

_FACTORS = (".lora_A.weight", ".lora_B.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Hold what a policy computes with."""

    model: Any  # of transformers
    factors: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by layer: A, scale * B


class Policies:
    """Hold policies by name; "" is the base model."""

    def __init__(self, directory: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        """Load the base model. Raises: ConfigError for a model whose attention has windows."""
        self._dtype, self._device = dtype, device
        self._active: dict[str, tuple[Tensor, Tensor]] = {}
        base = self._load(directory)
        self.config = base.config.get_text_config()
        _check_attention(self.config)
        self._linear = {name: module for name, module in base.named_modules() if isinstance(module, nn.Linear)}
        for name, module in self._linear.items():
            module.register_forward_hook(self._hook(name))
        self._policies = {"": Policy(model=base)}
        ends = [self.config.eos_token_id, getattr(base.generation_config, "eos_token_id", None)]
        listed = [each for some in ends for each in (some if isinstance(some, list) else [some])]
        self.end_ids = frozenset(each for each in listed if each is not None)

    def _load(self, directory: Path) -> Any:
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=self._dtype, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{directory}: cannot be loaded: {error}") from error
        return model.to(self._device).eval().requires_grad_(False)

    def _hook(self, name: str) -> Callable[..., Any]:
        def add(_: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            factors = self._active.get(name)
            if factors is None:
                return output
            return output + nn.functional.linear(nn.functional.linear(inputs[0], factors[0]), factors[1])

        return add

    def add(self, name: str, directory: Path) -> None:
        """Load a policy. Raises: ConfigError if it does not fit the base model."""
        if not is_adapter(directory):
            self._policies[name] = Policy(model=self._load(directory))
            return
        spec = read_adapter(directory, f"adapter {directory}").spec
        tensors = load_file(directory / WEIGHTS_FILE)
        names = {each.removeprefix(PREFIX).removesuffix(_FACTORS[0]) for each in tensors if each.endswith(_FACTORS[0])}
        if unknown := {each for each in tensors if not each.endswith(_FACTORS)} | (names - self._linear.keys()):
            raise ConfigError(f"{directory}: {sorted(unknown)[0]} is no adapter of a linear layer of this model")
        factors = {}
        for layer in names:
            a, b = (tensors[f"{PREFIX}{layer}{factor}"].to(self._device, torch.float32) for factor in _FACTORS)
            weight = self._linear[layer].weight
            if (b.shape[0], a.shape[1]) != tuple(weight.shape) or a.shape[0] != b.shape[1]:
                raise ConfigError(f"{directory}: {layer} has factors {tuple(a.shape)}, {tuple(b.shape)}")
            factors[layer] = a.to(self._dtype), (b * spec.scale).to(self._dtype)
        self._policies[name] = Policy(model=self._policies[""].model, factors=factors)

    def remove(self, name: str) -> None:
        """Free a policy's memory."""
        self._policies.pop(name, None)

    def __contains__(self, name: str) -> bool:
        return name in self._policies

    @contextmanager
    def using(self, name: str) -> Iterator[Any]:
        """Have the model that is given compute with a policy."""
        policy = self._policies[name]
        self._active = policy.factors
        try:
            with torch.inference_mode():
                yield policy.model
        finally:
            self._active = {}


def _check_attention(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    if kinds != {"full_attention"}:
        raise ConfigError(
            f"{config.model_type} has layers of {', '.join(sorted(kinds))}: samplers of plain transformers decode full "
            "attention alone; use another model"
        )
