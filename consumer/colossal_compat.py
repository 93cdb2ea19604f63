"""The one module that imports ColossalAI, after adapting version 0.5.0 to current torch and to machines without a GPU.

`install()` runs once, when this module is imported; the names that the consumer needs are exported below it. Where
ColossalAI offers a seam (the accelerator object) it is used; one function that it still calls is put back; nothing else
is patched, and nothing but that function changes on CUDA. What is silenced is named message by message.
"""

import functools
import logging
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist


@functools.cache
def install() -> None:
    """Make ColossalAI importable without noise and usable on this machine; a second call does nothing."""
    # torch 2.6 dropped this query for Huawei's collectives; colossalai.pipeline.p2p asks it before every transfer.
    if not hasattr(dist, "is_hccl_available"):
        dist.is_hccl_available = lambda: False
    _silence_imports()
    _set_accelerator()


def _silence_imports() -> None:
    """Advice about packages that this project does not use (fused CUDA kernels, asynchronous saving, 4-bit weights)."""
    for message in ("Please install apex from source", "Please install the latest tensornvme"):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
    # "Failed to load CPU gemm_4bit_forward": a kernel of bitsandbytes, which ColossalAI imports for quantised weights.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # At INFO, ColossalAI's own logger announces every plugin's settings on every rank, past our log configuration.
    from colossalai.logging import get_dist_logger

    get_dist_logger().set_level("WARNING")


def _set_accelerator() -> None:
    """ColossalAI's own CPU accelerator raises for random states, devices and streams, which plugins query anywhere."""
    if torch.cuda.is_available():
        return
    from colossalai.accelerator import CpuAccelerator, set_accelerator

    class QuietCpuAccelerator(CpuAccelerator):
        """A CPU as a device like any other: one of it, always in step, with torch's own random state."""

        def current_device(self) -> int:
            return 0

        def set_device(self, device: Any = None) -> None:
            return None

        def device_count(self) -> int:
            return 1

        def synchronize(self, device: Any = None) -> None:
            return None

        def empty_cache(self) -> None:
            return None

        def get_rng_state(self, device: Any = None) -> torch.Tensor:
            return torch.get_rng_state()

        def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
            torch.set_rng_state(new_state)

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def Stream(self, device: Any = None, priority: int = 0, **_: Any) -> None:
            return None

        def current_stream(self, device: Any = None) -> None:
            return None

        def stream(self, stream_: Any) -> AbstractContextManager[None]:
            return nullcontext()

    set_accelerator(QuietCpuAccelerator())


install()

from colossalai.accelerator import get_accelerator  # noqa: E402
from colossalai.booster import Booster  # noqa: E402
from colossalai.booster.plugin import HybridParallelPlugin  # noqa: E402
from colossalai.shardformer.policies.base_policy import ModulePolicyDescription, Policy  # noqa: E402

__all__ = ["Booster", "HybridParallelPlugin", "ModulePolicyDescription", "Policy", "get_accelerator", "install"]
