"""Add LoRA adapters to a model's linear layers: y + scale * B A x beside y = W x, with W as it is (arXiv:2106.09685).

Each factor begins as a whole tensor, which the seed and its name alone decide, as PEFT draws it; `attach` cuts it as
the layer beside it is cut, after tensor-parallel sharding. A layer keeps its class and its weight's name, so that all
that knows the model without adapters knows it with them. The parameters are `<layer>.lora_A.weight`, float32[rank, in],
and `<layer>.lora_B.weight`, float32[out, rank], which are PEFT's names without its prefix.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from coati_rl.errors import ConfigError
from coati_rl.model_files.adapted_layers import A, B, adapted_layers, is_saved_whole, last_parts
from coati_rl.model_files.adapter_files import ALL_LINEAR, PREFIX, WEIGHTS_FILE, AdapterSpec, read_adapter
from consumer.adapters.four_bits import quantize, whole_weight
from consumer.models.scalar_head import scalar_head
from consumer.parallel.layout import Layout
from consumer.parallel.parameters import ParameterInfo
from consumer.parallel.rank_sums import sum_backward, sum_forward

BASE_WEIGHT = ".base_layer.weight"  # the base's own, which PEFT writes beside the factors of an LM head
_MAX_NAMED = 3  # names in a message


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSource:
    """Say which adapters a model is trained with."""

    spec: AdapterSpec
    base: str  # name of the base model, written into the adapters' files
    seed: int = 0  # of A; B begins as 0
    directory: Path | None = None  # adapter to begin with; None: new ones
    has_four_bits: bool = False  # linear layers of the base, all but the head
    takes_lm_head: bool = False  # if a target names it


class Adapters:
    """Hold the adapters of one model on this rank."""

    def __init__(self, model: PreTrainedModel, infos: Sequence[ParameterInfo], source: AdapterSource) -> None:
        """Make the factors, whole; all of the model's own parameters are frozen but those that the source names.

        Args:
            model: whole, with all its layers.
            infos: its parameters.
            source: of the adapters.
        Raises: ConfigError if a target is no linear layer of the model, or the source's directory does not fit.
        """
        self.source = source
        self.is_on = True
        self._drops = False  # dropout is on
        head = scalar_head(model)
        saved = (*source.spec.saved_modules, *(() if head is None else ("score",)))
        by_name = {info.name: info for info in infos}
        model.requires_grad_(False)
        kept = {name: p for name, p in model.named_parameters() if is_saved_whole(name, saved)}
        for parameter in kept.values():
            parameter.requires_grad_(True)
        targets = _targets(model, source.spec.targets, takes_lm_head=source.takes_lm_head)
        self.layers = {name: by_name[f"{name}.weight"] for name in targets}
        self.factor_infos = _factor_infos(self.layers, source.spec.rank)
        # Weights of the base that `attach` quantizes, by their layers, and then this stage's layers themselves.
        named = _targets(model, (ALL_LINEAR,)) if source.has_four_bits else []
        self._to_quantize = {name: by_name[f"{name}.weight"] for name in named}
        self._quantized = dict[str, nn.Module]()
        self.infos = (*self.factor_infos, *(by_name[name] for name in kept))  # of all that is trained
        start = {} if source.directory is None else read_start(source.directory, self.infos)
        self._full = {info.name: nn.Parameter(initial_factor(info, source.seed, start)) for info in self.factor_infos}
        for name, parameter in kept.items() if start else ():
            parameter.data = start[name].to(parameter.dtype)
        self.parameters: dict[str, nn.Parameter] = self._full | kept  # by name, until `attach`

    def as_peft(self, *, has_scalar_head: bool) -> dict[str, Any]:
        """Return the contents of PEFT's adapter_config.json."""
        spec = self.source.spec
        targets = tuple(last_parts(self.layers)) if spec.targets == (ALL_LINEAR,) else spec.targets
        return spec.as_peft(base=self.source.base, has_scalar_head=has_scalar_head, targets=targets)

    def attach(self, model: PreTrainedModel, layout: Layout) -> None:
        """Add this rank's part of the factors to its layers; they stay the parameters that they were.

        Layers of the base that are to have 4 bits get them, one at a time.

        Args:
            model: this rank's part of the model; of layers of other pipeline stages nothing is added.
            layout: of this rank.
        """
        for name, info in self.layers.items():
            if info.stage != layout.stage:
                continue
            linear: Any = model.get_submodule(name)
            for factor, cut in ((A, info.split_dim == 1), (B, info.split_dim == 0)):
                parameter = self._full[f"{name}.{factor}.weight"]
                if cut and layout.tp_group is not None:
                    part = parameter.data.chunk(layout.tp_size, dim=1 if factor == A else 0)[layout.tp_rank]
                    parameter.data = part.contiguous()
                parameter.data = parameter.data.to(linear.weight.device)
                holder = nn.Module()
                holder.weight = parameter
                linear.add_module(factor, holder)
            linear.register_forward_hook(_Hook(self, info.split_dim, layout))
            if linear is model.get_output_embeddings():
                linear.adapted_weight = partial(self._adapted_weight, linear)  # for losses that do not call the head
        self._full, self.parameters = {}, {}  # those of other pipeline stages are dropped
        for name, info in self._to_quantize.items():
            if info.stage == layout.stage:
                self._quantized[name] = layer = model.get_submodule(name)
                quantize(layer, model.config.dtype)

    def quantized_weight(self, layer: str) -> Tensor | None:
        """Return the whole weight of a layer of the base that has 4 bits; None: it has not."""
        return whole_weight(self._quantized[layer]) if layer in self._quantized else None

    def merged(self, weight: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a layer's weight with its adapter; see `with_product`."""
        return with_product(weight, a, b, scale=self.source.spec.scale, dtype=dtype)

    def _adapted_weight(self, linear: Any) -> Tensor:
        """Return a layer's weight with its adapter, while adapters are on; its gradient is that of both factors."""
        if not self.is_on:
            return linear.weight
        return self.merged(linear.weight, linear.lora_A.weight, linear.lora_B.weight, linear.weight.dtype)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Compute with the base model alone."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True

    @contextmanager
    def dropout(self, seed: str) -> Iterator[None]:
        """Drop inputs of A by masks that `seed` alone decides; no other random state moves."""
        if self.source.spec.dropout == 0:
            yield
            return
        self._drops = True
        try:
            with torch.random.fork_rng():
                torch.manual_seed(_number(f"{self.source.seed} {seed}"))
                yield
        finally:
            self._drops = False

    def dropped(self, inputs: Tensor) -> Tensor:
        """Return inputs of A with dropout, in training alone."""
        return F.dropout(inputs, self.source.spec.dropout, training=self._drops)


class _Hook:
    """Add an adapter's output to its layer's."""

    def __init__(self, adapters: Adapters, split_dim: int | None, layout: Layout) -> None:
        self._adapters = adapters
        group = layout.tp_group
        self._sum_forward = group if split_dim == 1 else None
        self._sum_backward = group if split_dim == 0 else None

    def __call__(self, linear: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not self._adapters.is_on:
            return output
        short = F.linear(self._adapters.dropped(inputs[0]), linear.lora_A.weight)
        if self._sum_forward is not None:
            short = sum_forward(short, self._sum_forward)
        if self._sum_backward is not None:
            short = sum_backward(short, self._sum_backward)
        rows = torch.addmm(
            output.flatten(0, -2),
            short.flatten(0, -2),
            linear.lora_B.weight.T,
            alpha=self._adapters.source.spec.scale,
        )
        return rows.view(output.shape)


def with_product(weight: Tensor, a: Tensor, b: Tensor, *, scale: float, dtype: torch.dtype) -> Tensor:
    """Return weight + scale * b @ a, summed in float32 and rounded once.

    Args:
        weight: [out, in].
        a: [rank, in].
        b: [out, rank].
        scale: of the product.
        dtype: of the result.
    """
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale).to(dtype)


def adapter_infos(
    model: PreTrainedModel, infos: Sequence[ParameterInfo], spec: AdapterSpec, *, takes_lm_head: bool = False
) -> tuple[ParameterInfo, ...]:
    """Describe the factors of a whole model's adapters. `infos`: its own parameters. Raises: ConfigError."""
    by_name = {info.name: info for info in infos}
    targets = _targets(model, spec.targets, takes_lm_head=takes_lm_head)
    return _factor_infos({name: by_name[f"{name}.weight"] for name in targets}, spec.rank)


def _factor_infos(layers: Mapping[str, ParameterInfo], rank: int) -> tuple[ParameterInfo, ...]:
    return tuple(each for name, weight in layers.items() for each in layer_infos(name, weight, rank))


def _targets(model: PreTrainedModel, targets: Sequence[str], *, takes_lm_head: bool = False) -> list[str]:
    """Return the names of the layers that are adapted, in order. Raises: ConfigError."""
    return [*adapted_layers(model, targets, head=scalar_head(model), takes_lm_head=takes_lm_head)]


def layer_infos(name: str, weight: ParameterInfo, rank: int) -> tuple[ParameterInfo, ParameterInfo]:
    """Describe the two factors beside a layer's weight [out, in]."""
    out_size, in_size = weight.shape
    a_dim, b_dim = (1 if weight.split_dim == 1 else None), (0 if weight.split_dim == 0 else None)
    return (
        ParameterInfo(name=f"{name}.{A}.weight", shape=(rank, in_size), stage=weight.stage, split_dim=a_dim),
        ParameterInfo(name=f"{name}.{B}.weight", shape=(out_size, rank), stage=weight.stage, split_dim=b_dim),
    )


def initial_factor(info: ParameterInfo, seed: int, start: Mapping[str, Tensor]) -> Tensor:
    """Return a whole factor, float32: that of `start`, or where it is empty a new one, as PEFT draws it."""
    if start:
        return start[info.name].float()
    if info.name.endswith(f"{B}.weight"):
        return torch.zeros(info.shape)
    bound = 1 / math.sqrt(info.shape[1])  # of PEFT's kaiming_uniform_(a=sqrt(5))
    generator = torch.Generator().manual_seed(_number(f"{seed} {info.name}"))
    return torch.empty(info.shape).uniform_(-bound, bound, generator=generator)


def _number(text: str) -> int:
    """Return a seed that the text decides."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def read_start(directory: Path, infos: Sequence[ParameterInfo]) -> dict[str, Tensor]:
    """Read an adapter's tensors by name. Raises: ConfigError unless they are those of `infos`, and finite."""
    where = f"adapter {directory}"
    check_tensors(directory, where, infos)
    with safe_open(directory / WEIGHTS_FILE, "pt") as file:
        keys = [key for key in file.keys() if not key.endswith(BASE_WEIGHT)]  # noqa: SIM118, no mapping
        tensors = {key.removeprefix(PREFIX): file.get_tensor(key) for key in keys}
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ConfigError(f"{where}: {name} has values that are not finite")
    return tensors


def check_tensors(
    directory: Path,
    where: str,
    infos: Sequence[ParameterInfo],
    *,
    model: str = "the model, --lora-rank and --lora-targets",
) -> None:
    """Raise ConfigError unless an adapter's tensors have the names and shapes of `infos`.

    Args:
        directory: of the adapter.
        where: flag and value, for messages.
        infos: of the factors, and of what is trained beside them.
        model: what they are of, for messages.
    """
    expected = {info.name: info.shape for info in infos}
    found = read_adapter(directory, where).shapes
    found = {
        name: shape
        for name, shape in found.items()
        if not name.endswith(BASE_WEIGHT) or f"{name.removesuffix(BASE_WEIGHT)}.{A}.weight" not in expected
    }
    problems = [
        *(f"{name} is missing" for name in expected if name not in found),
        *(f"{name} is unknown" for name in found if name not in expected),
        *(
            f"{name} has shape {found[name]}, and {expected[name]} is needed"
            for name in expected
            if name in found and found[name] != expected[name]
        ),
    ]
    if problems:
        more = f" and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
        raise ConfigError(f"{where}: does not fit {model}: {'; '.join(problems[:_MAX_NAMED])}{more}")
