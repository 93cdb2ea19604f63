"""The one module that imports ColossalAI, after adapting version 0.5.0 to current torch and to machines without a GPU.

`install()` runs once, when this module is imported; the names that the consumer needs are exported from here. Where
ColossalAI offers a seam (the accelerator object) it is used. Patched are a function that it still calls and torch no
longer has, ZeRO's demand for a GPU where there is none, the loading of what another stage sends, and the plugin's
destructor. (While a backend is built `process_group` also gives new groups our timeout.) What is silenced is named
message by message.
"""

import functools
import logging
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

# Advice about packages that this project does not use (fused CUDA kernels, asynchronous saving).
warnings.filterwarnings("ignore", message="Please install apex from source", category=UserWarning)
warnings.filterwarnings("ignore", message="Please install the latest tensornvme", category=UserWarning)
# ColossalAI passes this argument of DDP under its old name, whatever its value.
warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
# torch 2.13's new names for two collectives and one test, which torch 2.11 and ColossalAI do not know yet.
for old_name in ("torch.distributed.reduce_scatter_tensor", "torch.distributed.all_gather_into_tensor"):
    warnings.filterwarnings("ignore", message=f"`{old_name}` is deprecated", category=FutureWarning)
warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated", category=FutureWarning)
# "Failed to load CPU gemm_4bit_forward": a kernel of bitsandbytes, which ColossalAI imports for quantised weights.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

from colossalai.accelerator import CpuAccelerator, set_accelerator  # noqa: E402
from colossalai.booster import Booster  # noqa: E402
from colossalai.booster.plugin import HybridParallelPlugin as ColossalPlugin  # noqa: E402
from colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelModule  # noqa: E402
from colossalai.logging import get_dist_logger  # noqa: E402
from colossalai.pipeline import p2p  # noqa: E402
from colossalai.shardformer.layer import (  # noqa: E402
    Linear1D_Col,
    Linear1D_Row,
    VocabParallelEmbedding1D,
    VocabParallelLMHead1D,
)
from colossalai.shardformer.policies.base_policy import (  # noqa: E402
    ModulePolicyDescription,
    Policy,
    SubModuleReplacementDescription,
)
from colossalai.zero.low_level import LowLevelZeroOptimizer  # noqa: E402

from consumer.parallel.layout import Layout  # noqa: E402
from consumer.parallel.pipeline_messages import read_message  # noqa: E402


@functools.cache
def install() -> None:
    """Make ColossalAI usable on this machine; a second call does nothing."""
    # torch 2.6 dropped this query for Huawei's collectives; colossalai.pipeline.p2p asks it before every transfer.
    if not hasattr(dist, "is_hccl_available"):
        dist.is_hccl_available = lambda: False  # type: ignore[attr-defined]
    p2p._cuda_safe_tensor_to_object = read_message  # its own unpickles anything
    # At INFO every plugin announces its settings on every rank, past our log configuration.
    get_dist_logger().set_level("WARNING")
    if not torch.cuda.is_available():
        set_accelerator(OneCpu())
        # It asks for a GPU and nothing else that could go wrong here: the plugin has just cast the parameters.
        LowLevelZeroOptimizer._sanity_checks = lambda self: None


class OneCpu(CpuAccelerator):
    """A CPU as a device like any other: one of it, always in step, with torch's own random state.

    ColossalAI's own raises for devices, random states and streams, which its plugins and layers query anywhere.
    """

    def current_device(self) -> int:
        """The only one."""
        return 0

    def device_count(self) -> int:
        """One."""
        return 1

    def set_device(self, device: Any = None) -> None:
        """Nothing to choose."""

    def synchronize(self, device: Any = None) -> None:
        """Nothing runs ahead."""

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Of torch's default generator."""
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        """Of torch's default generator."""
        torch.set_rng_state(new_state)

    def manual_seed(self, seed: int) -> None:
        """Of torch's default generator."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """The same as one."""
        torch.manual_seed(seed)

    def Stream(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        """None: everything is one stream."""

    def current_stream(self, device: Any = None) -> None:
        """None: everything is one stream."""

    def stream(self, stream_: Any) -> AbstractContextManager[None]:
        """Nothing to enter."""
        return nullcontext()


class HybridParallelPlugin(ColossalPlugin):
    """The plugin, but its process groups end when `close` says so."""

    def member_groups(self) -> list[dist.ProcessGroup]:
        """The process groups that this rank is a member of."""
        return list(self.pg_mesh._group_to_ranks)

    def layout(self) -> Layout:
        """This rank's place."""
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
        """Leave the plugin's process groups."""
        for group in self.member_groups():
            dist.destroy_process_group(group)

    def __del__(self) -> None:
        """Not the original: when the interpreter ends torch may be gone before, and it fails with a traceback."""


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
