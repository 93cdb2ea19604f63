"""Implement GenerationEngine with vLLM, in this process and on one thread, for the CPU build and for CUDA.

In: requests as token ids. Out: completions with the log-probabilities of the processed distribution. vLLM is imported
when the engine loads, with the environment variables of `engine_environment`; a process holds at most one engine.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from coati_rl.errors import EngineError, TransferError, TransferTimeoutError
from coati_rl.probe import ProbeAnswer
from coati_rl.processes.shared_memory import unlink_mapped
from coati_rl.transport.manifest import WeightManifest
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.transport.staging_memory import SharedFile
from coati_rl.types import GenerationRequest, GenerationResult
from producer.engines.admission import RequestRefusedError
from producer.engines.checkpoint import expect_update, find_checkpoint
from producer.engines.cpu_memory import cpu_kv_cache_bytes
from producer.engines.engine_thread import ThreadedEngine
from producer.engines.options import EngineOptions
from producer.engines.token_stream import TokenStream
from producer.engines.vllm_engine_args import engine_args
from producer.engines.vllm_requests import Outputs, RunningRequest
from producer.engines.vllm_routes import EngineRoutes
from producer.engines.vllm_served_adapters import lora_requests
from producer.engines.vllm_synced_adapter import SyncedAdapter

_PROBE_PREFIX = "coati probe "  # of request ids


class VllmEngine(ThreadedEngine):
    """Generate with vLLM."""

    def __init__(self, options: EngineOptions, *, policy_version: int = 0) -> None:
        """Start loading; see `ThreadedEngine.wait_ready`. `policy_version`: see `create_engine`."""
        super().__init__(_VllmCore(options), policy_version=policy_version)


class _VllmCore:
    """Implement `EngineCore` with vLLM's LLMEngine."""

    def __init__(self, options: EngineOptions) -> None:
        self.policy_version = 0
        self.identities: tuple[str, ...] = ()
        self.vocab_size = 0
        self._engine_args = engine_args(options)
        self.max_model_len: int = self._engine_args["max_model_len"]
        self._device = options.device
        self._adapter = SyncedAdapter(options.adapter)
        self._adapters = options.adapters  # directories by name
        self._returns_routes = options.returns_routes
        self._routes: EngineRoutes | None = None
        self._loras: dict[str | None, Any] = {None: None}  # of requests, by the adapter's name
        self._engine: Any = None
        self._running: dict[str, RunningRequest] = {}
        self._probes: dict[str, tuple[tuple[int, ...], Callable[[ProbeAnswer], None]]] = {}
        self._num_probes = 0  # so far
        self._shared: SharedFile | None = None  # in which a rank stages updates for all

    def load(self) -> None:
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
            raise EngineError("this process lacks its environment variables: start it with engine_environment()")
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        directory = find_checkpoint(self._engine_args["model"])
        self._expected = expect_update(directory, self._engine_args["dtype"], self._adapter.spec)
        self._engine_args |= self._adapter.engine_args(self._expected.entries)
        if self._device == "cpu" and self._engine_args["kv_cache_memory_bytes"] is None:
            self._engine_args["kv_cache_memory_bytes"] = cpu_kv_cache_bytes(self._engine_args)
        self._engine = LLMEngine.from_engine_args(EngineArgs(**self._engine_args))
        self._loras |= lora_requests(self._adapters)
        for lora in self._loras.values():
            if lora is not None:  # so that one that does not fit is refused here
                self._engine.add_lora(lora)
        self._engine.set_weight_version(str(self.policy_version))
        adapter = self._adapter.to_json(self._expected.entries)
        workers = self._engine.collective_rpc("coati_prepare", args=(os.getpid(), adapter))
        unlink_mapped({os.getpid(), *workers})  # queues between the ranks, which are all connected by now
        self.vocab_size = self._engine.model_config.get_vocab_size()
        if self._returns_routes:
            self._routes = EngineRoutes(self._engine, has_recorder=self._device == "cpu")

    def add(self, request: GenerationRequest, stream: TokenStream | None) -> None:
        params = self._sampling_arguments(request, stream)
        self._add_request(request.request_id, request.token_ids, params, self._loras[request.lora])
        self._running[request.request_id] = RunningRequest(request, stream)
        if self._routes is not None:
            self._routes.expect(request.request_id)

    def _sampling_arguments(self, request: GenerationRequest, stream: TokenStream | None) -> dict[str, Any]:
        """Return the arguments of vLLM's SamplingParams, by name."""
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        sampling = request.sampling
        return {
            "n": 1 if sampling.temperature == 0.0 else request.num_samples,  # vLLM refuses more for greedy: all equal
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "max_tokens": sampling.max_new_tokens,
            "stop": list(sampling.stop) or None,
            "seed": sampling.seed,  # sample i gets seed + i
            "logprobs": 0,  # of the sampled token alone
            "flat_logprobs": True,
            "detokenize": bool(sampling.stop),  # slow per token: without stop strings the text is decoded at the end
            "include_stop_str_in_output": True,  # the text is that of the tokens
            "output_kind": RequestOutputKind.FINAL_ONLY if stream is None else RequestOutputKind.CUMULATIVE,
            "structured_outputs": StructuredOutputsParams(json=request.json_schema) if request.json_schema else None,
        }

    def abort(self, request_id: str) -> GenerationResult | None:
        if request_id not in self._running:
            return None
        processor, outputs = self._engine.output_processor, Outputs()
        samples = [processor.request_states[number] for number in processor.external_req_ids.get(request_id, ())]
        for sample in samples:
            sample.queue = outputs  # vLLM puts an aborted sample's last output there
        self._engine.abort_request([request_id])
        for sample in samples:
            if sample.parent_req is not None:  # vLLM removes it only if the last sample is not aborted
                processor.parent_requests.pop(sample.parent_req.request_id, None)
        return next(iter(self._take(outputs)), None)

    def num_running(self) -> int:
        return len(self._running) + len(self._probes)

    def step(self) -> list[GenerationResult]:
        return self._take(self._engine.step())

    def _take(self, outputs: Sequence[Any]) -> list[GenerationResult]:
        """Add new outputs to their requests and probes. Returns: the results of finished requests."""
        results = []
        for output in outputs:
            self._adapter.check(output)
            if output.request_id in self._probes:
                self._answer(output)
                continue
            running = self._running[output.request_id]
            result = running.add(output, policy_version=self.policy_version, decode=self._decode)
            if result is not None:
                del self._running[output.request_id]
                results.append(result if self._routes is None else self._routes.added(result))
        return results

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._engine.get_tokenizer().decode(token_ids, skip_special_tokens=True))

    def probe(self, token_ids: tuple[int, ...], answer: Callable[[ProbeAnswer], None]) -> None:
        self._num_probes += 1
        probe_id = f"{_PROBE_PREFIX}{self._num_probes}"
        self._add_probe(probe_id, token_ids)
        self._probes[probe_id] = (token_ids, answer)
        self._reserve_place()

    def _add_probe(self, probe_id: str, token_ids: tuple[int, ...]) -> None:
        """Add a probe request ahead of all that wait.

        vLLM computes prompt log-probabilities without temperature, top-k, top-p and cache.
        """
        from vllm.sampling_params import RequestOutputKind

        params = {
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,  # of the prompt's own tokens only
            "flat_logprobs": True,
            "detokenize": False,
            "skip_reading_prefix_cache": True,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        self._add_request(probe_id, token_ids, params)
        waiting = self._scheduler.waiting  # a deque; the probe is its last
        waiting.prepend_request(waiting.pop())
        if self._routes is not None:
            self._routes.expect(probe_id)

    def _abort_probes(self) -> None:
        """Abort the probes, which may be partly computed."""
        self._engine.abort_request(list(self._probes))
        if self._routes is not None:
            self._routes.forget(self._probes)

    def _reserve_place(self) -> None:
        """Have one request more run than samples may, while there is a probe."""
        self._scheduler.max_num_active_reqs = self._engine_args["max_num_active_seqs"] + bool(self._probes)

    @property
    def _scheduler(self) -> Any:
        return self._engine.engine_core.engine_core.scheduler  # runs in this process, unlike tensor-parallel workers

    def _add_request(self, request_id: str, token_ids: Sequence[int], params: dict[str, Any], lora: Any = None) -> None:
        """Add a request, of samples or of a probe: all get the serving adapter here, where updates are adapters.

        Raises: RequestRefusedError, whatever vLLM raises: one request must not end the engine.
        """
        from vllm import SamplingParams

        adapter = self._adapter.request() or lora
        try:
            sampling = SamplingParams(**params)
            self._engine.add_request(request_id, _token_prompt(token_ids), sampling, lora_request=adapter)
        except Exception as error:
            with suppress(Exception):  # of its samples some may have been added
                self._engine.abort_request([request_id])
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise RequestRefusedError(reason) from error

    def _answer(self, output: Any) -> None:
        token_ids, answer = self._probes.pop(output.request_id)
        self._reserve_place()
        found = output.prompt_logprobs.logprobs if output.prompt_logprobs is not None else []
        logprobs = np.asarray(found, dtype=np.float32)
        if len(logprobs) != len(token_ids) - 1:
            raise EngineError(f"vLLM returned {len(logprobs)} log-probabilities for {len(token_ids)} tokens")
        routes = None if self._routes is None else self._routes.of_prompt(output)
        answer(ProbeAnswer(logprobs=logprobs, routes=routes))

    def start_staging(self, manifest: WeightManifest, rendezvous: Rendezvous, *, timeout_s: float) -> None:
        self._expected.check(manifest)
        arguments = (manifest.to_json(), rendezvous.to_json(), timeout_s, self._shared_path(manifest, rendezvous))
        self._engine.collective_rpc("coati_start_staging", args=arguments)

    def _shared_path(self, manifest: WeightManifest, rendezvous: Rendezvous) -> str | None:
        """Return the path of the ranks' shared memory, kept from one update to the next; None for one rank."""
        if not rendezvous.has_one_receiver or self._engine_args["tensor_parallel_size"] == 1:
            return None
        if self._shared is None or self._shared.num_bytes != manifest.num_staged_bytes:
            self._close_shared()
            self._shared = SharedFile(manifest.num_staged_bytes)
        return self._shared.path

    def _close_shared(self) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()

    def poll_staging(self) -> tuple[str, ...] | None:
        states = self._engine.collective_rpc("coati_poll_staging")
        if any(state == "receiving" for state, _ in states):
            return None
        for state, message in states:
            if state in ("timed out", "failed"):
                self._close_shared()  # operations that have not ended may still write there
                raise (TransferTimeoutError if state == "timed out" else TransferError)(message)
        return tuple(digest for _, digest in states if digest)

    def sleep(self) -> list[GenerationResult]:
        results: list[GenerationResult] = []
        while self._engine.engine_core.engine_core.batch_queue:  # steps in flight (asynchronous scheduling)
            results += self.step()
        self._engine.collective_rpc("coati_sleep")
        return results

    def wake(self) -> None:
        self._engine.collective_rpc("coati_wake")

    def commit(self, policy_version: int) -> list[GenerationResult]:
        from vllm.v1.core.sched.interface import PauseState

        core = self._engine.engine_core.engine_core
        results: list[GenerationResult] = []
        self._abort_probes()
        self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while core.batch_queue:  # steps in flight (asynchronous scheduling) sample with the old weights
                results += self.step()
            core.pause_scheduler("keep", clear_cache=True)  # running requests recompute keys and values
            digests = self._engine.collective_rpc("coati_commit")
            self._engine.collective_rpc("coati_wake_cache")
            self.identities = tuple(self._expected.identity(digest) for digest in digests if digest)
            self._adapter.commit(policy_version)
            self._engine.set_weight_version(str(policy_version))
        finally:
            core.resume_scheduler()
            for probe_id, (token_ids, _) in self._probes.items():
                self._add_probe(probe_id, token_ids)
        self.policy_version = policy_version
        return results

    def close(self) -> None:
        if self._engine is not None:
            self._close_shared()
            self._engine.collective_rpc("coati_close")
            self._engine.engine_core.shutdown()


def _token_prompt(token_ids: Sequence[int]) -> dict[str, Any]:
    """Return a prompt in vLLM's format for token ids."""
    return {"type": "token", "prompt_token_ids": list(token_ids)}
