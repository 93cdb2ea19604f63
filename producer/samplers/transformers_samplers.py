"""Implement Tinker's sampling part with plain transformers: many policies at once, each row exact and on its own.

Consumes: requests of any policy. Waits for: requests. Is unblocked by: `close`. Policies take turns, a step of one
block each, so that a policy with many rows does not hold up one with few.
"""

import asyncio
import threading
from collections import OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coati_rl.errors import CoatiError, EngineError
from coati_rl.tinker.core import RequestError, SampleRequest, SampleResult, check_prompt
from producer.samplers.decoding import Block, Prefill, Row, drawn, prefill
from producer.samplers.policies import Policies

_MAX_KEPT_TOKENS = 2**15  # of prompts whose keys and values are kept
_PREFILLS = 16  # prompts that are computed before rows of a policy get their next token


@dataclass(kw_only=True, slots=True, eq=False)
class _Asked:
    """Hold a request that is being answered."""

    request: SampleRequest
    answer: "Future[SampleResult]"
    rows: list[Row]
    num_open: int
    prompt_logprobs: Any = None
    top_k_prompt: Any = None


@dataclass(kw_only=True, slots=True)
class _Line:
    """Hold the requests of a policy."""

    waiting: deque[tuple[_Asked, Row]] = field(default_factory=deque)
    blocks: deque[Block] = field(default_factory=deque)


class TransformersSamplers:
    """Implement `SamplingCore`."""

    def __init__(
        self, directory: Path, *, max_tokens: int, dtype: str = "float32", device: str = "cpu", max_blocks: int = 16
    ) -> None:
        """Load the base model.

        Args:
            directory: of the base model and its tokenizer.
            max_tokens: of a prompt and its continuation.
            dtype: of the weights.
            device: that computes.
            max_blocks: of 16 rows, of one policy at a time; further rows wait.
        Raises: ConfigError if it cannot be served.
        """
        from transformers import AutoTokenizer

        self._device = torch.device(device)
        self._policies = Policies(directory, dtype=getattr(torch, dtype), device=self._device)
        tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self._decode = lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
        self.max_tokens, self._max_blocks = max_tokens, max_blocks
        self.vocab_size = int(self._policies.config.vocab_size)
        self._end_ids = self._policies.end_ids | {tokenizer.eos_token_id} - {None}
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._prefills: OrderedDict[tuple[Any, ...], Prefill] = OrderedDict()
        self._changed = threading.Condition()
        self._withdrawn: list[str] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="sampling", daemon=True)
        self._thread.start()

    def publish(self, sampler: str, directory: Path) -> None:
        """See `SamplingCore.publish`. Raises: RequestError."""
        try:
            self._policies.add(sampler, directory)
        except CoatiError as error:
            raise RequestError(str(error)) from error

    def withdraw(self, sampler: str) -> None:
        with self._changed:
            self._withdrawn.append(sampler)
            self._changed.notify()

    def check(self, request: SampleRequest) -> None:
        check_prompt(request, max_tokens=self.max_tokens, vocab_size=self.vocab_size)
        if request.top_k_prompt_logprobs > self.vocab_size:
            raise RequestError(f"topk_prompt_logprobs: the vocabulary has {self.vocab_size} tokens")

    async def sample(self, request: SampleRequest) -> SampleResult:
        self.check(request)
        asked = _Asked(request=request, answer=Future(), rows=[], num_open=request.num_samples)
        room = self.max_tokens - len(request.prompt)
        ends = self._end_ids if request.stop_ids is None else frozenset(request.stop_ids)
        if request.stop_ids is None and request.stop_texts:
            ends = frozenset()
        for index in range(request.num_samples):
            seed = np.random.SeedSequence() if request.seed is None else np.random.SeedSequence([request.seed, index])
            row = Row(
                request=request,
                end_ids=ends,
                max_tokens=min(request.max_tokens or room, room),
                draws=np.random.default_rng(seed),
                done=partial(self._row_done, asked),
            )
            asked.rows.append(row)
        with self._changed:
            if self._is_closed:
                raise EngineError("the sampling part has ended")
            line = self._lines.setdefault(request.sampler, _Line())
            line.waiting.extend((asked, row) for row in asked.rows)
            self._changed.notify()
        try:
            return await asyncio.wrap_future(asked.answer)
        except asyncio.CancelledError:
            for row in asked.rows:
                row.is_cancelled = True
            raise

    async def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._withdrawn or self._is_closed)
                withdrawn, self._withdrawn = self._withdrawn, []
                names = list(self._lines)
                if self._is_closed:
                    break
            for name in withdrawn:
                self._policies.remove(name)
                for key in [each for each in self._prefills if each[0] == name]:
                    del self._prefills[key]
            for name in names:
                self._turn(name)
        for line in self._lines.values():
            self._fail(line, EngineError("the sampling part has ended"))

    def _turn(self, name: str) -> None:
        """Give a policy its turn: prompts for free places, then a step of one block."""
        line = self._lines[name]
        try:
            if name not in self._policies:
                raise RequestError(f"no sampler {name!r} is published")
            with self._policies.using(name) as model:
                self._fill(name, line, model)
                if line.blocks:
                    line.blocks.rotate(-1)
                    line.blocks[-1].step(model, self._decode)
        except Exception as error:  # noqa: BLE001, it is the answer of all that wait for it
            self._fail(line, error)
        with self._changed:
            line.blocks = deque(each for each in line.blocks if each.num_free < len(each.rows))
            if not line.blocks and not line.waiting:
                self._lines.pop(name, None)

    def _fill(self, name: str, line: _Line, model: Any) -> None:
        for _ in range(_PREFILLS):
            if not line.waiting:
                return
            block = next((each for each in line.blocks if each.num_free), None)
            if block is None and len(line.blocks) >= self._max_blocks:
                return
            asked, row = line.waiting[0]  # until it has a place: should this fail, `_fail` answers what waits
            if not row.is_cancelled:
                computed = self._prefill(name, asked, model)
                tokens, logprobs = drawn(computed.logits, [row])
                if row.take(tokens[0], logprobs[0], self._decode):
                    row.done(None)
                else:
                    if block is None:
                        block = Block(self._device)
                        line.blocks.append(block)
                    block.put(row, computed.layers)
            with self._changed:
                line.waiting.popleft()

    def _prefill(self, name: str, asked: _Asked, model: Any) -> Prefill:
        """Run the model on a prompt, or find what an equal one has left."""
        request = asked.request
        scores = request.wants_prompt_logprobs or request.top_k_prompt_logprobs > 0
        key = (name, scores, *request.prompt)
        found = self._prefills.pop(key, None)
        if found is None or (scores and asked.prompt_logprobs is None):
            found = prefill(model, request.prompt, keeps_logits=scores)
        if scores and found.all_logits is not None and asked.prompt_logprobs is None:
            self._score(asked, found.all_logits)
        self._prefills[key] = Prefill(layers=found.layers, logits=found.logits, all_logits=None)
        while sum(len(each) for each in self._prefills) > _MAX_KEPT_TOKENS and len(self._prefills) > 1:
            self._prefills.popitem(last=False)
        return found

    @staticmethod
    def _score(asked: _Asked, logits: torch.Tensor) -> None:
        """Compute a prompt's log-probabilities. logits: float32[P, V]."""
        request, rows = asked.request, logits[:-1].log_softmax(dim=-1)
        ids = torch.tensor(list(request.prompt[1:]), device=rows.device, dtype=torch.long)
        picked = rows.gather(-1, ids[:, None])[:, 0].cpu().numpy()
        asked.prompt_logprobs = np.concatenate([[np.nan], picked]).astype(np.float32)
        if request.top_k_prompt_logprobs:
            values, tokens = rows.topk(request.top_k_prompt_logprobs, dim=-1)
            padding = ((1, 0), (0, 0))  # of the first token there is none
            logprobs = np.pad(values.cpu().numpy(), padding, constant_values=np.nan)
            asked.top_k_prompt = np.pad(tokens.cpu().numpy(), padding).astype(np.int32), logprobs

    def _row_done(self, asked: _Asked, error: BaseException | None = None) -> None:
        if error is not None:
            _answer(asked, error)
            return
        asked.num_open -= 1
        if asked.num_open:
            return
        request = asked.request
        result = SampleResult(
            sequences=[row.sequence for row in asked.rows],
            prompt_logprobs=asked.prompt_logprobs if request.wants_prompt_logprobs else None,
            top_k_prompt=asked.top_k_prompt,
        )
        _answer(asked, result)

    def _fail(self, line: _Line, error: BaseException) -> None:
        with self._changed:
            waiting, line.waiting = list(line.waiting), deque()
        rows = [row for block in line.blocks for row in block.rows if row is not None]
        line.blocks.clear()
        failed = {id(each): each for each, _ in waiting}
        for asked in failed.values():
            _answer(asked, error)
        for row in rows:
            row.done(error)


def _answer(asked: _Asked, result: SampleResult | BaseException) -> None:
    if asked.answer.done() or not (asked.answer.running() or asked.answer.set_running_or_notify_cancel()):
        return
    if isinstance(result, BaseException):
        asked.answer.set_exception(result)
    else:
        asked.answer.set_result(result)
