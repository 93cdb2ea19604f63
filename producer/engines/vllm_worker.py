"""Add weight updates to a vLLM worker; vLLM mixes this class into its own by `worker_extension_cls`.

In: JSON, by collective_rpc from the engine thread. Out: plain values. All names begin with `coati_`, since the class is
shared with vLLM. The weights are received through the transport's own group, into memory beside the model.
"""

import logging
import os
from collections.abc import Sequence
from typing import Any, Literal

from coati_rl.errors import TransferError, TransferTimeoutError
from coati_rl.model_files.values import HEAD
from coati_rl.processes.ending import end_with_parent
from coati_rl.transport.checksum import HostDigest
from coati_rl.transport.manifest import WeightManifest
from coati_rl.transport.rendezvous import Rendezvous
from producer.engines.staging import StagingArea
from producer.engines.vllm_routes import WorkerRoutes
from producer.engines.vllm_sampler import draw_ahead
from producer.engines.vllm_sleep import WorkerSleep
from producer.engines.vllm_synced_adapter import WorkerAdapter

StagingState = Literal["receiving", "staged", "failed", "timed out"]


class StagingWorkerExtension:
    """Stage and commit weight updates in a vLLM worker."""

    # Attributes of vLLM's worker class:
    rank: int
    device: Any
    model_runner: Any
    model_config: Any
    vllm_config: Any

    coati_staging: StagingArea
    coati_adapter: WorkerAdapter | None
    coati_sleeping: WorkerSleep
    coati_routes: WorkerRoutes

    def coati_prepare(self, engine_pid: int, adapter: str) -> int:
        """Prepare the worker after loading; a worker process is killed by the kernel when the engine's process ends.

        Args:
            engine_pid: id of the engine's process.
            adapter: see `SyncedAdapter.to_json`.
        Returns: this process's id.
        """
        self.coati_adapter = WorkerAdapter.prepared(adapter, self.model_runner.lora_manager) if adapter else None
        self.coati_sleeping = WorkerSleep(self, keeps_weights=self.coati_adapter is not None)
        self.coati_staging = StagingArea(device=self.device, tensor_parallel_rank=self.rank)
        # It warns of layers without new weights, such as rotary embeddings; names are checked before the transfer.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        if self.device.type == "cpu":
            draw_ahead(self.model_runner.sampler.topk_topp_sampler)
        if os.getpid() != engine_pid:
            end_with_parent(engine_pid)
        return os.getpid()

    def coati_record_routes(self) -> None:
        """Record the experts that tokens are routed to, on a CPU."""
        self.coati_routes = WorkerRoutes(self.model_runner)

    def coati_take_routes(self, request_ids: list[str]) -> list[Any]:
        """Return the routes of requests that have ended; of rank 0, as all ranks have the same."""
        return self.coati_routes.take(request_ids) if self.rank == 0 else []

    def coati_start_staging(self, manifest: str, rendezvous: str, timeout_s: float, shared: str | None) -> None:
        """Start receiving in the background; see `StagingArea.start`."""
        parsed = WeightManifest.from_json(manifest), Rendezvous.from_json(rendezvous)
        self.coati_staging.start(*parsed, timeout_s=timeout_s, shared=shared)

    def coati_poll_staging(self) -> tuple[StagingState, str]:
        """Return the state and its digest or error message; an exception here would end vLLM's executor.

        The digest is empty on a rank for which another one receives.
        """
        try:
            staged = self.coati_staging.poll()
        except TransferTimeoutError as error:
            return "timed out", str(error)
        except TransferError as error:
            return "failed", str(error)
        return ("receiving", "") if staged is None else ("staged", staged.digest)

    def coati_commit(self) -> str:
        """Load the staged weights; no step may be running. After an error the model is unusable.

        Layer by layer, each parameter is copied from what is staged: of a whole tensor in host memory, this rank's
        shard alone gets to its GPU.

        Returns: the digest of what was loaded; empty of whole weights on a rank for which another one receives.
        """
        staged = self.coati_staging.take()
        if self.coati_adapter is not None:
            self.coati_adapter.load(staged.tensors)
            _synchronize(self.device)
            return staged.digest or host_digest(staged.tensors)
        load_model_weights(self, staged.tensors)
        return staged.digest

    def coati_sleep(self) -> None:
        """Free weights, cache and the memory of transfers; see `WorkerSleep`."""
        self.coati_staging.release()
        self.coati_sleeping.sleep()

    def coati_wake(self) -> None:
        """Allocate weights, for the commit that follows."""
        self.coati_sleeping.wake()

    def coati_wake_cache(self) -> None:
        """Allocate the cache after that commit; without a sleep before it there is nothing to do."""
        self.coati_sleeping.wake_cache()

    def coati_close(self) -> None:
        """Close the transfer group."""
        self.coati_staging.close()


def load_model_weights(worker: Any, tensors: Sequence[tuple[str, Any]]) -> None:
    """Load all weights into the model of a vLLM worker; no step may be running. After an error it is unusable."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model = worker.model_runner.model
    with torch.no_grad(), torch.device(worker.device), set_current_vllm_config(worker.vllm_config):
        # load_weights() alone fails on CPU, where the weights of linear layers are packed and the originals freed.
        _forget_packed_experts(model, worker.device)
        initialize_layerwise_reload(model)
        model.load_weights(iter(tensors))
        finalize_layerwise_reload(model, worker.model_config)
        _repack_tied_head(model, [name for name, _ in tensors], worker.device)
    _synchronize(worker.device)


def _synchronize(device: Any) -> None:
    """Wait until a GPU has copied what was loaded: the next update overwrites what copies read."""
    import torch

    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _forget_packed_experts(model: Any, device: Any) -> None:
    """Have the reload prepare experts on CPU as the first load does: it packs them for its grouped products.

    vLLM does so only for a layer that has no kernel yet. A reload would leave plain weights where the kernel reads
    packed ones, and the log-probabilities would be off without an error.
    """
    if device.type != "cpu":
        return
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(method, "moe_kernel"):
            method.moe_kernel = None


def _repack_tied_head(model: Any, updated: Sequence[str], device: Any) -> None:
    """Repack a tied lm_head on CPU: it is a packed copy of the embeddings, which a reload does not update.

    An update without an lm_head says that it is tied. vLLM's own configuration says otherwise where the checkpoint has
    a copy of the embeddings.
    """
    head = getattr(model, "lm_head", None)
    embeddings = getattr(getattr(model, "model", None), "embed_tokens", None)
    is_tied = not any(name.endswith(HEAD) for name in updated)
    if device.type != "cpu" or not is_tied or head is None or embeddings is None or head is embeddings:
        return
    head.weight = embeddings.weight
    head.quant_method.process_weights_after_loading(head)


def host_digest(tensors: Sequence[tuple[str, Any]]) -> str:
    """Return the digest of tensors that another rank has received, as it computes it."""
    digest = HostDigest()
    for _, tensor in tensors:
        digest.add(tensor.view(-1))
    return digest.bytes().hex()
