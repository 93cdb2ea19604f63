"""Emulate CUDA in this process: as soon as it has imported torch, cupy or vLLM's attention, replace their kernels.

The interpreter imports it at its start when COATI_EMULATED_GPU_HOME is set (build.sh).
"""

import ctypes
import importlib.abc
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

LIBRARIES = Path(os.environ["COATI_EMULATED_GPU_LIBRARIES"])


def replace_torch_kernels() -> None:
    """Compute torch's CUDA operations with its CPU kernels, and attention from its definition."""
    library = ctypes.CDLL(str(LIBRARIES / "libdispatch.so"), mode=ctypes.RTLD_GLOBAL)
    from emulation import attention

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kernels that are there already
        library.emulated_replace_kernels()
        attention.replace_kernels()


def replace_cupy_runtime() -> None:
    """Give cupy the emulated runtime: its own is linked statically, and asks for a driver."""
    from emulation import cupy_runtime

    cupy_runtime.replace_runtime()


def replace_vllm_kernels() -> None:
    """Compute vLLM's kernels from their definitions."""
    from emulation import vllm_kernels

    vllm_kernels.replace_kernels()


def replace_triton_attention() -> None:
    """Compute vLLM's attention in float32 from its definition."""
    from emulation import vllm_kernels

    vllm_kernels.replace_triton_attention()


def find_emulated_runtime() -> None:
    """Give vLLM's allocator, which copies by the runtime that it finds loaded, the emulated one beside CUDA's."""
    from vllm.utils import system_utils

    find = system_utils.find_loaded_library
    system_utils.find_loaded_library = lambda name: (
        str(LIBRARIES / "libcudart.so.13") if name == "libcudart" else find(name)
    )


AFTER_IMPORT: dict[str, Callable[[], None]] = {
    "torch": replace_torch_kernels,
    "cupy": replace_cupy_runtime,
    "vllm.vllm_flash_attn.flash_attn_interface": replace_vllm_kernels,
    "vllm.utils.system_utils": find_emulated_runtime,
    "vllm.v1.attention.ops.triton_unified_attention": replace_triton_attention,
}


class AfterImport(importlib.abc.MetaPathFinder):
    """Call a module's function once the module is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module with the other finders, and extend its loader."""
        function = AFTER_IMPORT.pop(name, None)
        if function is None:
            return None
        spec = importlib.util.find_spec(name)  # this finder does not know the name now
        AFTER_IMPORT[name] = function  # again: who asked may only want to know whether there is such a module
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_replace(module: ModuleType) -> None:
            del AFTER_IMPORT[name]
            run(module)
            function()

        spec.loader.exec_module = run_and_replace  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, AfterImport())
