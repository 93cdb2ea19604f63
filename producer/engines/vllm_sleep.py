"""Free the memory of a vLLM worker's weights and cache between a trainers' turn and the next commit.

On a GPU it is vLLM's sleep mode, whose addresses stay, as CUDA graphs need. The CPU build has none: there the storages
are emptied in place and the packed weights of linear layers dropped, which a reload packs again. A worker whose updates
are adapters alone keeps its base: on a GPU in host memory, on a CPU where it is.
"""

from collections.abc import Iterator
from typing import Any

import torch

from coati_rl.errors import EngineError
from coati_rl.processes.freed_memory import return_freed_memory

# Levels of vLLM's sleep: weights are copied to the host, or dropped; buffers are kept there in both.
_KEEPS, _DROPS = 1, 2


class WorkerSleep:
    """Put a worker to sleep and wake it; weights that it drops are of any value until the commit that follows."""

    def __init__(self, worker: Any, *, keeps_weights: bool) -> None:
        self._worker, self._keeps_weights = worker, keeps_weights
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []

    def sleep(self) -> None:
        """Free weights and cache; no step may be running."""
        if self._worker.device.type == "cuda":
            self._worker.sleep(level=_KEEPS if self._keeps_weights else _DROPS)
            return
        for module in [] if self._keeps_weights else self._worker.model_runner.model.modules():
            if hasattr(module, "cpu_linear"):  # holds the packed weights
                module.cpu_linear = _use_asleep
        self._emptied = [(each, each.nbytes()) for each in self._storages()]
        for storage, _ in self._emptied:
            storage.resize_(0)
        return_freed_memory(self._worker.device)

    def wake(self) -> None:
        """Allocate weights and cache again."""
        if self._worker.device.type == "cuda":
            self._worker.wake_up()
        emptied, self._emptied = self._emptied, []
        for storage, size in emptied:
            storage.resize_(size)

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        runner, seen = self._worker.model_runner, set[int]()
        weights = () if self._keeps_weights else runner.model.parameters()
        for tensor in (*weights, *runner.kv_caches):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage


def _use_asleep(*_: Any) -> Any:
    raise EngineError("the engine sleeps: it has no weights until the next commit")
