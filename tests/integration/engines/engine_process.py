"""Run one generation engine in its own process, and forward calls to it.

vLLM needs its environment before it is imported and suffers no second engine in its process; so it lives in a manager
process, to which several threads may talk at once. The other engines live in the test's own process.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from typing import Any

import pytest
from bench.weight_sync import nccl_environment

from coati_rl.processes.actor_process import device_environment
from coati_rl.processes.imports import uncollected
from coati_rl.types import GenerationRequest, GenerationResult, TokenChunk

METHODS = (
    "abort",
    "num_sequences",
    "open_episode",
    "close_episode",
    "stage_weights",
    "commit_weights",
    "probe",
    "sleep",
)
OWN = (
    "submit",
    "stream",
    "abort_after",
    "chunks",
    "is_done",
    "result",
    "version",
    "num_computed",
    "process_ids",
    "gpu_bytes",
    "run",
    "tensors",
    "shutdown",
)


class HostedEngine:
    """The engine as seen from outside of its process."""

    def __init__(self, backend: str, settings: dict[str, Any]) -> None:
        from producer.engines import EngineOptions, create_engine

        self._backend = backend
        others = dict(settings)
        version = others.pop("policy_version", 0)
        self._engine = create_engine(backend, EngineOptions(**others), policy_version=version)
        for name in METHODS:
            setattr(self, name, getattr(self._engine, name))
        self._num_computed = 0
        if backend == "vllm":
            self._count_computed(self._engine._core._engine.engine_core.engine_core.scheduler)
        self._futures: dict[str, Future[GenerationResult]] = {}
        self._chunks: dict[str, list[TokenChunk]] = {}

    def submit(self, request: GenerationRequest) -> None:
        self._futures[request.request_id] = self._engine.submit(request)

    def stream(self, request: GenerationRequest) -> None:
        """Submit, and keep the chunks."""
        chunks = self._chunks[request.request_id] = []
        self._futures[request.request_id] = self._engine.submit(request, chunks.append)

    def abort_after(self, request: GenerationRequest, num_chunks: int) -> None:
        """Submit, and abort when that many chunks have come: before the next step."""
        chunks = self._chunks[request.request_id] = []

        def note(chunk: TokenChunk) -> None:
            chunks.append(chunk)
            if len(chunks) == num_chunks:
                self._engine.abort(request.request_id)

        self._futures[request.request_id] = self._engine.submit(request, note)

    def chunks(self, request_id: str) -> list[TokenChunk]:
        """Those that have come so far."""
        return list(self._chunks[request_id])

    def is_done(self, request_id: str) -> bool:
        return self._futures[request_id].done()

    def result(self, request_id: str, timeout_s: float) -> GenerationResult:
        """Wait for the result of a request; futures themselves do not cross processes."""
        return self._futures[request_id].result(timeout_s)

    def version(self) -> int:
        return self._engine.policy_version

    def num_computed(self) -> int:
        """Tokens that vLLM's scheduler has let the model compute, of prompts and of responses."""
        return self._num_computed

    def _count_computed(self, scheduler: Any) -> None:
        schedule = scheduler.schedule

        def counted(*arguments: Any, **options: Any) -> Any:
            step = schedule(*arguments, **options)
            self._num_computed += step.total_num_scheduled_tokens
            return step

        scheduler.schedule = counted

    def gpu_bytes(self) -> int:
        """Of its first GPU, in use: vLLM takes the memory away from addresses that torch goes on to hold."""
        import torch

        if self._backend == "transformers":
            return torch.cuda.memory_allocated()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def process_ids(self) -> tuple[int, list[int]]:
        """This process and those below it."""
        import psutil

        me = psutil.Process()
        return me.pid, [child.pid for child in me.children(recursive=True)]

    def run(self, function: Callable[[], Any]) -> Any:
        """Call a function of a module in the engine's process."""
        return function()

    def tensors(self) -> dict[str, Any]:
        """vLLM's, by the names of the checkpoint."""
        from tests.integration.engines.held_tensors import held_tensors

        executor = self._engine._core._engine.engine_core.engine_core.model_executor
        return held_tensors(executor.driver_worker.worker.model_runner.model)

    def shutdown(self) -> None:
        self._engine.close()


class EngineManager(BaseManager):
    pass


EngineManager.register("HostedEngine", HostedEngine, exposed=(*METHODS, *OWN))


def _import_vllm() -> None:
    """As a producer does."""
    with uncollected():
        import vllm.v1.engine.llm_engine  # noqa: F401


@contextmanager
def hosted_engine(backend: str, **settings: Any) -> Iterator[Any]:
    """A loaded engine, or a proxy of it."""
    if backend != "vllm":
        engine = HostedEngine(backend, settings)
        yield engine
        engine.shutdown()
        return
    from producer.engines.environment import engine_environment

    manager = EngineManager(ctx=get_context("spawn"))
    with pytest.MonkeyPatch.context() as patch:  # the new process inherits what is set here
        device, width = settings.get("device", "cpu"), settings.get("tensor_parallel_size", 1)
        for name, value in engine_environment(device, width).items():
            patch.setenv(name, value)
        if device == "cuda":  # as Ray gives them to a producer
            patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(width))))
            for name, value in (nccl_environment(1) | device_environment(device, "fp32")).items():
                patch.setenv(name, value)
        manager.start(_import_vllm)
    try:
        engine = manager.HostedEngine(backend, settings)
        yield engine
        with suppress(EOFError, OSError):  # a test may have killed it
            engine.shutdown()
    finally:
        manager.shutdown()
