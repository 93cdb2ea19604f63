"""Implement GenerationEngine with plain transformers: slower than vLLM, but for all architectures of transformers.

In: requests as token ids. Out: completions with the log-probabilities of the processed distribution. Up to
max_num_seqs samples are decoded as one batch to the end, before the next batch begins. A request's samples are decoded
together: where max_num_seqs is their number, a request is a batch of its own, and its bits do not depend on others.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from coati_rl.errors import EngineError
from coati_rl.model_files.stored_views import StoredParameter, stored_parameters
from coati_rl.probe import ProbeAnswer
from coati_rl.processes.freed_memory import return_freed_memory
from coati_rl.transport.manifest import WeightManifest
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.types import Completion, GenerationRequest, GenerationResult
from producer.engines.checkpoint import expect_update, find_checkpoint
from producer.engines.decoding import DecodingBatch, Row
from producer.engines.engine_thread import ThreadedEngine
from producer.engines.options import EngineOptions
from producer.engines.staging import StagingArea
from producer.engines.stop_strings import final_text
from producer.engines.token_stream import TokenStream
from producer.engines.transformers_routes import RouteRecorder


class TransformersEngine(ThreadedEngine):
    """Generate with transformers' own model code."""

    def __init__(self, options: EngineOptions, *, policy_version: int = 0) -> None:
        """Start loading; see `ThreadedEngine.wait_ready`. `policy_version`: see `create_engine`."""
        self._transformers = _TransformersCore(options)
        super().__init__(self._transformers, policy_version=policy_version)

    def share_weights(self, weights: Mapping[str, torch.Tensor], policy_version: int, *, timeout_s: float) -> None:
        """Serve weights of this process without copying them; no request may be running, and requests wait.

        Args:
            weights: by name, of the model's shapes and dtype, on its device. Who changes them calls this again.
            policy_version: of theirs.
            timeout_s: time limit, in seconds.
        Raises: EngineError if they are not this model's.
        """

        def share() -> None:
            self._transformers.share(weights, policy_version)
            self.policy_version, self._is_asleep = policy_version, False

        self._call(share, until=time.monotonic() + timeout_s, what="sharing weights")


class _TransformersCore:
    """Implement `EngineCore` with transformers."""

    def __init__(self, options: EngineOptions) -> None:
        self.policy_version = 0
        self.vocab_size = 0
        self.max_model_len = options.max_model_len
        self._name = options.model
        self._dtype = options.dtype
        self._max_num_seqs = options.max_num_seqs
        self._device = torch.device(options.device)
        self._shares_weights = options.shares_weights
        self._returns_routes = options.returns_routes
        self._recorder: RouteRecorder | None = None
        self._staging = StagingArea(device=self._device)
        self.identities: tuple[str, ...] = ()
        self._eos_token_ids: frozenset[int] = frozenset()
        self._stored: dict[str, StoredParameter] = {}  # what updates hold of each parameter, by its name
        self._queue: deque[list[Row]] = deque()  # samples of a request, max_num_seqs at most
        self._batch: DecodingBatch | None = None
        self._shapes: dict[str, torch.Size] = {}  # of the parameters, while they are asleep
        self._unfinished: dict[str, tuple[GenerationRequest, list[Row]]] = {}

    def load(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        directory = find_checkpoint(self._name)
        self._expected = expect_update(directory, self._dtype, None)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, self._dtype))
        self._model: Any = model.to(self._device).eval().requires_grad_(False)
        self._parameters: dict[str, torch.nn.Parameter] = dict(self._model.named_parameters())
        if not self._shares_weights:
            for each in self._parameters.values():  # else a map of a file, whose alignment changes how products round
                each.data = each.data.clone()
        self._stored = stored_parameters(self._model)
        differ = {name for each in self._stored.values() for name, _ in each.entries()} ^ self._expected.entries.keys()
        if differ:
            names = ", ".join(sorted(differ)[:3])
            raise EngineError(
                f"{directory}: transformers' parameters and the checkpoint's tensors differ in {names}; "
                "save the model with save_pretrained of this version of transformers"
            )
        self._recorder = RouteRecorder(self._model) if self._returns_routes else None
        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.vocab_size = self._model.config.get_text_config().vocab_size
        eos = self._model.generation_config.eos_token_id
        declared = eos if isinstance(eos, list) else [eos]
        self._eos_token_ids = frozenset({*declared, self._tokenizer.eos_token_id} - {None})

    def add(self, request: GenerationRequest, stream: TokenStream | None) -> None:
        room = self.max_model_len - len(request.token_ids)
        rows = [
            Row(
                request_id=request.request_id,
                index=index,
                prompt=request.token_ids,
                sampling=request.sampling,
                max_tokens=min(request.sampling.max_new_tokens, room),
                generator=torch.Generator().manual_seed(request.sampling.seed + index),  # on CPU on every device
                stream=stream,
            )
            for index in range(request.num_samples)
        ]
        size = self._max_num_seqs
        self._queue.extend(rows[start : start + size] for start in range(0, len(rows), size))
        self._unfinished[request.request_id] = (request, rows)

    def abort(self, request_id: str) -> GenerationResult | None:
        if request_id not in self._unfinished:
            return None
        for row in self._unfinished[request_id][1]:
            row.finish_reason = row.finish_reason or "abort"
        self._queue = deque(rows for rows in self._queue if rows[0].finish_reason is None)
        if self._batch is not None:
            self._batch.drop_finished()
            if self._batch.is_done():
                self._batch = None
        return self._result(request_id)

    def num_running(self) -> int:
        return len(self._unfinished)

    def step(self) -> list[GenerationResult]:
        if self._batch is None:
            rows = self._queue.popleft()
            while self._queue and len(rows) + len(self._queue[0]) <= self._max_num_seqs:
                rows += self._queue.popleft()
            self._batch = DecodingBatch(
                self._model,
                rows,
                eos_token_ids=self._eos_token_ids,
                decode=self._decode_text,
                recorder=self._recorder,
            )
        finished = self._batch.step(self.policy_version)
        if self._batch.is_done():
            self._batch = None
        return [
            self._result(request_id)
            for request_id in dict.fromkeys(row.request_id for row in finished)
            if all(row.finish_reason for row in self._unfinished[request_id][1])
        ]

    def _result(self, request_id: str) -> GenerationResult:
        _, rows = self._unfinished.pop(request_id)
        return GenerationResult(request_id=request_id, completions=tuple(self._completion(row) for row in rows))

    def _completion(self, row: Row) -> Completion:
        return Completion(
            token_ids=np.asarray(row.token_ids, dtype=np.int32),
            logprobs=np.asarray(row.logprobs, dtype=np.float32),
            policy_versions=np.asarray(row.policy_versions, dtype=np.int32),
            finish_reason=row.finish_reason or "abort",
            text=final_text(row.token_ids, row.sampling.stop, self._decode_text),
            routes=np.concatenate(row.routes) if row.routes else None,
        )

    def _decode_text(self, token_ids: Any) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def probe(self, token_ids: tuple[int, ...], answer: Callable[[ProbeAnswer], None]) -> None:
        ids = torch.tensor([token_ids], device=self._device)  # int64[1, T]
        with torch.inference_mode():
            logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1]
        logprobs = logits.float().log_softmax(dim=-1).gather(-1, ids[0, 1:, None])[:, 0]
        routes = None if self._recorder is None else self._recorder.take(ids)[0]
        answer(ProbeAnswer(logprobs=logprobs.cpu().numpy(), routes=routes))

    def start_staging(self, manifest: WeightManifest, rendezvous: Rendezvous, *, timeout_s: float) -> None:
        self._expected.check(manifest)
        self._staging.start(manifest, rendezvous, timeout_s=timeout_s)

    def poll_staging(self) -> tuple[str, ...] | None:
        staged = self._staging.poll()
        return None if staged is None else (staged.digest,)

    def sleep(self) -> list[GenerationResult]:
        if self._batch is not None:
            self._batch.clear_cache()
        self._shapes = {name: each.shape for name, each in self._parameters.items()}
        for each in self._parameters.values():
            each.data = each.data.new_empty(0)
        self._staging.release()
        return_freed_memory(self._device)
        return []

    def wake(self) -> None:
        for name, each in self._parameters.items():
            each.data = each.data.new_empty(self._shapes[name])

    def commit(self, policy_version: int) -> list[GenerationResult]:
        staged = self._staging.take()
        self.identities = (self._expected.identity(staged.digest),)
        with torch.no_grad():
            own = dict(tensor for name, each in self._stored.items() for tensor in each.split(self._parameters[name]))
            for name, tensor in staged.tensors:
                own[name].copy_(tensor)  # a tied lm_head is the same memory
        if self._batch is not None:
            self._batch.clear_cache()
        self.policy_version = policy_version
        return []

    def share(self, weights: Mapping[str, torch.Tensor], policy_version: int) -> None:
        """See `TransformersEngine.share_weights`."""
        own = self._parameters
        differ = [
            *sorted(own.keys() ^ weights.keys()),
            *(name for name in own if name in weights and not self._is_of(own[name], weights[name])),
        ]
        if differ:
            raise EngineError(f"{len(differ)} of the weights are not this engine's in {self._dtype}: {differ[0]}")
        for name, each in own.items():
            each.data = weights[name]
        self.policy_version = policy_version

    def _is_of(self, own: torch.Tensor, weight: torch.Tensor) -> bool:
        """Return True if a weight can be in this parameter's place, which has no size while it is asleep."""
        is_like = weight.dtype == own.dtype and weight.device == own.device
        return is_like and (own.shape == weight.shape or not own.numel())

    def close(self) -> None:
        self._staging.close()
