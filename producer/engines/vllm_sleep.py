"""Free the memory of a vLLM worker's weights and cache between a trainers' turn and the next commit.

On a GPU it is vLLM's sleep mode, whose addresses stay, as CUDA graphs need. The CPU build has none: there the storages
are emptied in place and the packed weights of linear layers dropped, which a reload packs again. A worker whose updates
are adapters alone keeps its base: on a GPU in host memory, on a CPU where it is.
"""

import gc
from collections.abc import Iterable
from typing import Any

import torch

from coati_rl.errors import EngineError
from coati_rl.processes.freed_memory import return_freed_memory

# Levels of vLLM's sleep: weights are copied to the host, or dropped; buffers are kept there in both.
_KEEPS, _DROPS = 1, 2

_Emptied = tuple[torch.UntypedStorage, int]  # with its size in bytes


class WorkerSleep:
    """Put a worker to sleep and wake it; weights that it drops are of any value until the commit that follows."""

    def __init__(self, worker: Any, *, keeps_weights: bool) -> None:
        self._worker, self._keeps_weights = worker, keeps_weights
        self._weights: list[_Emptied] = []
        self._caches: list[_Emptied] = []
        self._has_cache = True

    def sleep(self) -> None:
        """Free weights and cache; no step may be running."""
        self._has_cache = False
        if self._worker.device.type == "cuda":
            self._worker.sleep(level=_KEEPS if self._keeps_weights else _DROPS)
            return
        runner = self._worker.model_runner
        for module in [] if self._keeps_weights else runner.model.modules():
            if hasattr(module, "cpu_linear"):  # holds the packed weights
                module.cpu_linear = _use_asleep
        self._weights = _empty([] if self._keeps_weights else runner.model.parameters())
        self._caches = _empty(runner.kv_caches)
        gc.collect()  # what a reload has left
        return_freed_memory(self._worker.device)

    def wake(self) -> None:
        """Allocate weights again, before they are loaded."""
        if self._worker.device.type == "cuda":
            self._worker.wake_up(tags=["weights"])
        _fill(self._weights)

    def wake_cache(self) -> None:
        """Allocate the cache again, if it was freed, after the weights are loaded."""
        if self._has_cache:
            return
        if self._worker.device.type == "cuda":
            self._worker.wake_up(tags=["kv_cache"])
        _fill(self._caches)
        self._has_cache = True


def _empty(tensors: Iterable[torch.Tensor]) -> list[_Emptied]:
    """Empty the storages of tensors, each once. Returns: what fills them again."""
    found, seen = list[_Emptied](), set[int]()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            found.append((storage, storage.nbytes()))
    for storage, _ in found:
        storage.resize_(0)
    return found


def _fill(emptied: list[_Emptied]) -> None:
    while emptied:
        storage, size = emptied.pop()
        storage.resize_(size)


def _use_asleep(*_: Any) -> Any:
    raise EngineError("the engine sleeps: it has no weights until the next commit")
