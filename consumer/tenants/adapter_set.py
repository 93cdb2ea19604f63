"""Hold one model's adapters on this rank: factors, their summed gradients, and Adam's moments.

A factor begins as PEFT draws it, by seed and name alone, and is cut as the layer beside it. Gradients are added to
beside autograd, by the layers, in the order of the requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from coati_rl.model_files.adapted_layers import A, B
from coati_rl.model_files.adapter_files import AdapterSpec
from coati_rl.tinker.core import AdamStep
from consumer.adapters.adapters import initial_factor
from consumer.optim.gradient_clipping import scale_and_clip, sum_of_squares
from consumer.parallel.parallelism import Parallelism
from consumer.parallel.parameters import ParameterInfo
from consumer.parallel.process_group import collective

MOMENTS = ("exp_avg", "exp_avg_sq")
_ALIGNMENT = 16  # elements


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """Hold a layer's two factors and their gradients, this rank's parts."""

    a: Tensor  # float32[rank, in]
    b: Tensor  # float32[out, rank]
    grad_a: Tensor
    grad_b: Tensor


class AdapterSet:
    """Hold the adapters of one model; methods are collective over the ranks unless noted."""

    def __init__(
        self,
        spec: AdapterSpec,
        infos: Sequence[ParameterInfo],
        parallelism: Parallelism,
        *,
        seed: int,
        start: Mapping[str, Tensor],
    ) -> None:
        """Make the factors.

        Args:
            spec: rank, scale and layers.
            infos: of the factors, two for each layer.
            parallelism: of the base.
            seed: of A.
            start: whole factors by name to begin with; empty: new ones.
        """
        self.spec = spec
        self._infos = {info.name: info for info in infos}
        self._parallelism = parallelism
        self._layout = parallelism.layout
        parts = {info.name: self._part(info.name, initial_factor(info, seed, start)) for info in infos}
        self._weights, self.tensors = _views(parts, parallelism.device)
        for name, part in parts.items():
            self.tensors[name].copy_(part)
        self._gradient, self._gradients = _views(parts, parallelism.device)
        self._optimizer = torch.optim.AdamW([self._weights], fused=True)
        layers = [name.removesuffix(f".{A}.weight") for name in self._infos if name.endswith(f".{A}.weight")]
        self.layers = {layer: self._factors(layer) for layer in layers}

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what pieces that are multiplied together have in common; not collective."""
        return self.spec.rank, self.spec.scale, tuple(self.layers)

    def step(self, numbers: AdamStep) -> float:
        """Take an AdamW step on the gradient's sum over all ranks, and clear it (arXiv:1711.05101).

        Returns: the gradient's norm before clipping.
        Raises: EngineError if the norm is not finite; the weights are unchanged then, and the gradient is cleared.
        """
        if self._layout.dp_group is not None:
            with collective("sum gradients over trainers"):
                dist.all_reduce(self._gradient, group=self._layout.dp_group)
        counted = [gradient for name, gradient in self._gradients.items() if self._counts_in_norm(name)]
        squares = self._parallelism.sum_over_ranks(sum_of_squares(counted))
        try:
            bound = numbers.grad_clip_norm or float("inf")
            norm = scale_and_clip([self._gradient], squares, loss_scale=1.0, max_norm=bound)
            self._optimizer.param_groups[0].update(
                lr=numbers.learning_rate,
                betas=(numbers.beta1, numbers.beta2),
                eps=numbers.eps,
                weight_decay=numbers.weight_decay,
            )
            self._weights.grad = self._gradient
            self._optimizer.step()
        finally:
            self._gradient.zero_()
        return norm

    @property
    def num_steps(self) -> int:
        """Return the steps taken; not collective."""
        state = self._optimizer.state.get(self._weights, {})
        return int(state["step"]) if state else 0

    def full(self, *, with_moments: bool) -> dict[str, Tensor]:
        """Return the whole factors by name; with moments, once there are any, also these by "kind/name"."""
        found = {name: self._full(name, tensor) for name, tensor in self.tensors.items()}
        if with_moments and self.num_steps:
            for kind in MOMENTS:
                moments = self._by_name(self._optimizer.state[self._weights][kind])
                found |= {f"{kind}/{name}": self._full(name, each) for name, each in moments.items()}
        return found

    def load_moments(self, num_steps: int, moments: Mapping[str, Tensor]) -> None:
        """Take the moments of `full`, which are of so many steps; not collective."""
        state = {kind: torch.zeros_like(self._weights) for kind in MOMENTS}
        for kind, flat in state.items():
            for name, own in self._by_name(flat).items():
                own.copy_(self._part(name, moments[f"{kind}/{name}"]))
        step = torch.tensor(float(num_steps), device=self._weights.device)
        self._optimizer.state[self._weights] = {"step": step, **state}

    def _by_name(self, flat: Tensor) -> dict[str, Tensor]:
        return _cut(flat, {name: tensor.shape for name, tensor in self.tensors.items()})

    def _factors(self, layer: str) -> Factors:
        a, b = f"{layer}.{A}.weight", f"{layer}.{B}.weight"
        return Factors(self.tensors[a], self.tensors[b], self._gradients[a], self._gradients[b])

    def _counts_in_norm(self, name: str) -> bool:
        """Return True on exactly one of the ranks that hold the same elements."""
        return self._layout.dp_rank == 0 and (self._infos[name].split_dim is not None or self._layout.tp_rank == 0)

    def _part(self, name: str, full: Tensor) -> Tensor:
        dim = self._infos[name].split_dim
        if self._layout.tp_group is None or dim is None:
            return full
        return full.chunk(self._layout.tp_size, dim=dim)[self._layout.tp_rank].contiguous()

    def _full(self, name: str, part: Tensor) -> Tensor:
        dim, group = self._infos[name].split_dim, self._layout.tp_group
        if group is None or dim is None:
            return part.detach().cpu().clone()
        parts = [torch.empty_like(part) for _ in range(self._layout.tp_size)]
        with collective(f"gather {name}"):
            dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=dim).cpu()


def _views(parts: Mapping[str, Tensor], device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """Return zeros in one piece of memory, float32, and the tensor of each name in it."""
    size = sum(_place(part.shape) for part in parts.values())
    flat = torch.zeros(size, device=device)
    return flat, _cut(flat, {name: part.shape for name, part in parts.items()})


def _cut(flat: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    parts = flat.split([_place(shape) for shape in shapes.values()])
    return {name: part[: shape.numel()].view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def _place(shape: torch.Size) -> int:
    """Return the elements that a tensor takes, so that the next one begins at a multiple of 64 bytes."""
    return -(-shape.numel() // _ALIGNMENT) * _ALIGNMENT
