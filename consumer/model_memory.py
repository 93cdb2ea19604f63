"""Keep a model's tensors elsewhere while they are not used (--offload), and give them memory when they are.

A frozen model is used while it scores or takes other weights, an optimizer's states and masters of their own in a step
and by checkpoints. Each group of tensors is offloaded by itself, whatever else of the model is offloaded meanwhile.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from consumer.parallel.parallelism import ModelParameters
from consumer.tensor_offload import TensorOffload, without_storages_of

Group = Literal["weights", "head", "optimizer"]  # of a frozen model the LM head and all else, of a trained one the last


class ModelMemory:
    """Own where the tensors of one model are; without `offload` they stay where they are."""

    def __init__(self, module: Any, parameters: ModelParameters, torch_optimizer: Any) -> None:
        """Take what a rank holds of a model. `torch_optimizer`: None of a frozen model."""
        self._module, self._parameters, self._optimizer = module, parameters, torch_optimizer
        self._groups: dict[Group, tuple[TensorOffload, Callable[[], Iterable[Tensor]]]] = {}

    def tensors(self) -> Iterator[Tensor]:
        """Yield what this rank holds of the model between two steps."""
        yield from self.weights()
        yield from self.optimizer_tensors()

    def weights(self) -> Iterator[Tensor]:
        """Yield what the model computes with, and this rank's part of it: parameters and buffers."""
        yield from itertools.chain(self._module.parameters(), self._module.buffers(), self._parameters.local.values())

    def optimizer_tensors(self) -> Iterator[Tensor]:
        """Yield the optimizer's masters and states, but for masters that are the weights themselves."""
        yield from without_storages_of(self._of_optimizer(), self.weights())

    def offload(self, device: torch.device, directory: Path) -> None:
        """Give up the memory of what is used at times only: frozen weights, or masters and the optimizer's states.

        Args:
            device: that the model is on.
            directory: of the files, if it is the CPU.
        Raises: RunError if there is no room; so does `used`, after a change.
        """
        if self._optimizer is None:
            tensors: dict[Group, Callable[[], Iterable[Tensor]]] = {
                "weights": lambda: without_storages_of(self.weights(), self._head()),
                "head": self._head,
            }
        else:
            tensors = {"optimizer": self.optimizer_tensors}
        for group, find in tensors.items():
            kept = TensorOffload(device=device, directory=directory, flag="--offload")
            kept.offload(find())
            self._groups[group] = kept, find

    @contextmanager
    def used(self, *groups: Group, changes: bool = False) -> Iterator[None]:
        """Give groups of tensors memory and contents inside of the block; not collective.

        Args:
            groups: to be used; those that are never given up are there.
            changes: whether the block may change tensors, or make others.
        """
        with ExitStack() as stack:
            for kept, find in (self._groups[group] for group in groups if group in self._groups):
                if changes:
                    kept.onload()
                    stack.callback(_offload, kept, find)
                else:
                    stack.enter_context(kept.onloaded())
            yield

    def _head(self) -> Iterator[Tensor]:
        head = self._module.get_output_embeddings()
        yield from () if head is None else head.parameters()

    def _of_optimizer(self) -> Iterator[Tensor]:
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                yield from group["params"]
            for state in self._optimizer.state.values():
                yield from (each for each in state.values() if isinstance(each, Tensor))


def _offload(kept: TensorOffload, find: Callable[[], Iterable[Tensor]]) -> None:
    kept.offload(find())
