"""Import ColossalAI 0.5.0 and adapt it to current torch and to machines without a GPU; no other module imports it.

`install()` runs once, when this module is imported; the names that the consumer needs are exported from here. The
accelerator object is replaced through ColossalAI's own interface. Patched are: a torch function that ColossalAI calls
and torch has removed, ZeRO's check for a GPU, the copy of shards, the unpickling of what another pipeline stage sends,
and the plugin's destructor. (While a backend is built, `process_group` also sets the timeout of new groups.) Warnings
are filtered one message at a time.
"""

import functools
import logging
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from consumer.parallel.deferred_compilation import deferred_compilation

# Advice about packages that this project does not use (fused CUDA kernels, asynchronous saving).
warnings.filterwarnings("ignore", message="Please install apex from source", category=UserWarning)
warnings.filterwarnings("ignore", message="Please install the latest tensornvme", category=UserWarning)
# ColossalAI always passes this argument of DDP under its old name.
warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
# torch 2.13 renamed two collectives and one check; torch 2.11 and ColossalAI lack the new names.
for old_name in ("torch.distributed.reduce_scatter_tensor", "torch.distributed.all_gather_into_tensor"):
    warnings.filterwarnings("ignore", message=f"`{old_name}` is deprecated", category=FutureWarning)
warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated", category=FutureWarning)
# "Failed to load CPU gemm_4bit_forward": a kernel of bitsandbytes, which ColossalAI imports for quantised weights.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

with deferred_compilation():  # bitsandbytes, which ColossalAI imports, compiles functions of its optimizers
    from colossalai.accelerator import CpuAccelerator, set_accelerator
    from colossalai.booster import Booster
    from colossalai.booster.plugin import HybridParallelPlugin as ColossalPlugin
    from colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelModule
    from colossalai.logging import get_dist_logger
    from colossalai.pipeline import p2p
    from colossalai.shardformer.layer import (
        Linear1D_Col,
        Linear1D_Row,
        VocabParallelEmbedding1D,
        VocabParallelLMHead1D,
    )
    from colossalai.shardformer.policies.base_policy import (
        ModulePolicyDescription,
        Policy,
        SubModuleReplacementDescription,
    )
    from colossalai.tensor.d_tensor import comm_spec
    from colossalai.zero.low_level import LowLevelZeroOptimizer

from consumer.parallel.layout import Layout  # noqa: E402
from consumer.parallel.pipeline_messages import read_message  # noqa: E402


@functools.cache
def install() -> None:
    """Make ColossalAI usable on this machine; a second call does nothing."""
    # torch 2.6 dropped this query for Huawei's collectives; colossalai.pipeline.p2p asks it before every transfer.
    if not hasattr(dist, "is_hccl_available"):
        dist.is_hccl_available = lambda: False  # type: ignore[attr-defined]
    p2p._cuda_safe_tensor_to_object = read_message  # the original unpickles any class
    comm_spec._split = _shard_of  # the original copies it before it is converted; see `shardformer_policy`
    # At INFO every plugin prints its settings on every rank, independent of our logging configuration.
    get_dist_logger().set_level("WARNING")
    if not torch.cuda.is_available():
        set_accelerator(SingleCpuAccelerator())
        # It checks for a GPU and for parameter dtypes, which the plugin has just cast.
        LowLevelZeroOptimizer._sanity_checks = lambda self: None


def _shard_of(tensor: torch.Tensor, spec: Any) -> torch.Tensor:
    """Return this rank's part of a whole tensor along one dimension, a view of it."""
    group = spec.process_group_dict[spec.logical_process_axis]
    return tensor.chunk(dist.get_world_size(group), spec.shard_dim)[dist.get_rank(group)]


class SingleCpuAccelerator(CpuAccelerator):
    """Present the CPU as one synchronous device with torch's default random state.

    ColossalAI's own class raises for devices, random states and streams, which its plugins and layers query.
    """

    def current_device(self) -> int:
        """Return 0, the index of the only device."""
        return 0

    def device_count(self) -> int:
        """Return 1."""
        return 1

    def set_device(self, device: Any = None) -> None:
        """Do nothing: there is one device."""

    def synchronize(self, device: Any = None) -> None:
        """Do nothing: CPU operations are synchronous."""

    def empty_cache(self) -> None:
        """Do nothing: there is no cache."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Return the state of torch's default generator."""
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        """Set the state of torch's default generator."""
        torch.set_rng_state(new_state)

    def manual_seed(self, seed: int) -> None:
        """Seed torch's default generator."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch's default generator, the only one."""
        torch.manual_seed(seed)

    def Stream(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        """Return None: there are no streams."""

    def current_stream(self, device: Any = None) -> None:
        """Return None: there are no streams."""

    def stream(self, stream_: Any) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()


class HybridParallelPlugin(ColossalPlugin):
    """Extend the plugin by an explicit `close` of its process groups."""

    def member_groups(self) -> list[dist.ProcessGroup]:
        """Return the process groups that this rank is a member of."""
        return list(self.pg_mesh._group_to_ranks)

    def layout(self) -> Layout:
        """Return this rank's layout."""
        mesh = self.pg_mesh

        def group(axis: int) -> dist.ProcessGroup | None:
            return mesh.get_group_along_axis(axis) if mesh.size(axis) > 1 else None

        return Layout(
            dp_rank=int(mesh.coordinate(self.dp_axis)),
            dp_size=self.dp_size,
            stage=int(mesh.coordinate(self.pp_axis)),
            num_stages=self.pp_size,
            tp_rank=int(mesh.coordinate(self.tp_axis)),
            tp_size=self.tp_size,
            zero_stage=self.zero_stage,
            dp_group=group(self.dp_axis),
            pp_group=group(self.pp_axis),
            tp_group=group(self.tp_axis),
        )

    def close(self) -> None:
        """Destroy the plugin's process groups."""
        for group in self.member_groups():
            dist.destroy_process_group(group)

    def __del__(self) -> None:
        """Do nothing: the original prints a traceback if torch is unloaded before it at interpreter exit."""


install()

__all__ = [
    "Booster",
    "HybridParallelModule",
    "HybridParallelPlugin",
    "Linear1D_Col",
    "Linear1D_Row",
    "ModulePolicyDescription",
    "Policy",
    "SubModuleReplacementDescription",
    "VocabParallelEmbedding1D",
    "VocabParallelLMHead1D",
    "install",
]
