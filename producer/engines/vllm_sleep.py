"""Free the memory of a vLLM worker's weights and cache between a trainers' turn and the next commit.

On a GPU it is vLLM's sleep mode, level 2, whose addresses stay, as CUDA graphs need. The CPU build has none: there the
storages are emptied in place and the packed weights of linear layers dropped, which a reload packs again.
"""

from collections.abc import Iterator
from typing import Any

import torch

from coati_rl.errors import EngineError
from coati_rl.processes.freed_memory import return_freed_memory

LEVEL = 2  # of vLLM's sleep: weights are dropped, not copied to the host; buffers are kept there


class WorkerSleep:
    """Put a worker to sleep and wake it; weights are of any value until the commit that follows."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []

    def sleep(self) -> None:
        """Free weights and cache; no step may be running."""
        if self._worker.device.type == "cuda":
            self._worker.sleep(level=LEVEL)
            return
        for module in self._worker.model_runner.model.modules():
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
        for tensor in (*runner.model.parameters(), *runner.kv_caches):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage


def _use_asleep(*_: Any) -> Any:
    raise EngineError("the engine sleeps: it has no weights until the next commit")
