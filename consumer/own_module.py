"""Hold one rank's part of a torch module of the user's own, whose methods are the steps of training.

In: a class of transformers' models with methods of the user's, and a model directory. Out: what the methods return, and
the weights, which are sent to engines as those of any trainer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from coati_rl.config.sync import SyncConfig
from coati_rl.model_files.quiet import no_progress_bars
from coati_rl.model_files.stored_views import stored_parameters
from coati_rl.processes.freed_memory import return_freed_memory
from coati_rl.transport.manifest import TensorEntry, dtype_name
from consumer.joined_rank import JoinedRank
from consumer.models.float32_compute import Float32Compute
from consumer.offloaded_parts import OffloadedParts
from consumer.parallel.layout import Layout
from consumer.tensor_offload import without_storages_of
from consumer.weight_sync.rank_role import make_sender
from consumer.weight_sync.rank_sender import RankSender

BUILT = "on_weights_materialized"  # RLite's name of the method that makes the optimizer


@dataclass(frozen=True, slots=True)
class Split:
    """Mark an argument of which each rank gets its part, in order."""

    values: Sequence[Any]

    def part(self, rank: int, size: int) -> Sequence[Any]:
        """Return the part of a rank; parts differ by one value at most."""
        begin, end = (len(self.values) * place // size for place in (rank, rank + 1))
        return self.values[begin:end]


class OwnModuleRank(JoinedRank):
    """Load the module, shard it over several ranks by FSDP2, and call its methods; implements `Exporter`.

    Methods are collective.
    """

    module: Any = None

    def build(self, module_class: type, directory: Path, dtype: str, seed: int, address: str, in_turns: bool) -> None:
        """Load the weights, and call the module's `on_weights_materialized`, if it has that.

        Args:
            module_class: a subclass of a model class of transformers.
            directory: of the model.
            dtype: "float32" or "bfloat16".
            seed: of this rank's random numbers, the same on all ranks.
            address: of the first rank, as engines reach it; empty: all are on this machine.
            in_turns: engines in other processes share this rank's device.
        """
        torch.manual_seed(seed)
        with no_progress_bars():
            made: Any = module_class
            module = made.from_pretrained(directory, dtype=getattr(torch, dtype), trust_remote_code=False)
        size = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if size > 1 else 0
        self.layout = Layout(dp_rank=rank, dp_size=size, fsdp_size=size, zero_stage=3 if size > 1 else 0)
        self._dtype = getattr(torch, dtype)
        self._stored = stored_parameters(module)
        if size > 1:
            _shard(module)
        module.to(self.device)
        if size == 1 and self.device.type == "cpu":  # else maps of the files
            for each in module.parameters():
                each.data = each.data.clone()
        self.module = module
        self._offloaded_parts = OffloadedParts(
            self.device, {"weights": self._weights, "optimizer": self._optimizer_tensors}
        )
        sender = make_sender(
            self,
            SyncConfig().weight_transport,
            gpu_memory_utilization=1.0,
            host=address or "127.0.0.1",
            is_one_node=not address,
            directory=None,
            shares_process=self.shares_process,
            in_turns=in_turns,
        )
        self._sender = RankSender(self, sender)
        if hasattr(module, BUILT):
            getattr(module, BUILT)()

    def call(self, method: str, arguments: Sequence[Any]) -> Any:
        """Return what a method of the module returns for this rank's arguments."""
        own = [
            each.part(self.layout.dp_rank, self.layout.dp_size) if isinstance(each, Split) else each
            for each in arguments
        ]
        try:
            return getattr(self.module, method)(*own)
        finally:
            self._reshard()

    def weight_entries(self) -> tuple[TensorEntry, ...]:
        dtype = dtype_name(self._dtype)
        entries = (entry for each in self._stored.values() for entry in each.entries())
        return tuple(TensorEntry(name=name, dtype=dtype, shape=shape) for name, shape in entries)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, whole in self._whole():
            yield from self._stored[name].split(whole)

    def base_identity(self) -> str:
        return ""

    def probe(self, token_ids: Sequence[int]) -> list[np.ndarray]:
        """Return the log-probabilities of tokens after the first, in bfloat16 also those of float32."""
        found = [self._logprobs(token_ids)]
        if self._dtype == torch.bfloat16:
            with Float32Compute():
                found.append(self._logprobs(token_ids))
        return found

    def save(self, directory: Path) -> None:
        """Write the weights as a Hugging Face checkpoint."""
        state = {name: weight.cpu() for name, weight in self._whole()}
        if self.layout.sender == 0:
            self.module.save_pretrained(directory, state_dict=state)

    def meta(self) -> None:
        """Leave the engines, and drop the module."""
        if self.module is not None:
            self._sender.close()
            self.module = None
            del self._offloaded_parts, self._sender
            return_freed_memory(self.device)

    def close(self) -> None:
        """Release the module."""
        self.meta()

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole parameters by their names in the module, in the dtype of the weights; collective."""
        for name, each in self.module.named_parameters():
            whole = each.full_tensor() if hasattr(each, "full_tensor") else each
            yield name, whole.detach().to(self._dtype)

    def _logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        ids = torch.tensor([[*token_ids]], device=self.device)
        with torch.no_grad():
            logits = self.module(input_ids=ids).logits[0, :-1].float()
        self._reshard()
        logprobs: np.ndarray = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].cpu().numpy()
        return logprobs

    def _reshard(self) -> None:
        """Drop the whole weights that a forward without backward leaves, which would not see later changes."""
        if self.layout.dp_size > 1:
            self.module.reshard()

    def _weights(self) -> Iterator[Tensor]:
        yield from self.module.parameters()
        yield from self.module.buffers()

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        """Yield the states of optimizers that are attributes of the module."""
        optimizers = (each for each in vars(self.module).values() if isinstance(each, torch.optim.Optimizer))
        states = (state for optimizer in optimizers for state in optimizer.state.values())
        tensors = (each for state in states for each in state.values() if isinstance(each, Tensor))
        yield from without_storages_of(tensors, self._weights())


def _shard(module: nn.Module) -> None:
    """Shard the decoder's layers and the rest by FSDP2; gradients are averaged over the ranks, as PyTorch does."""
    from torch.distributed.fsdp import fully_shard
    from transformers.modeling_layers import GradientCheckpointingLayer

    for layer in [each for each in module.modules() if isinstance(each, GradientCheckpointingLayer)]:
        fully_shard(layer)
    fully_shard(module)
