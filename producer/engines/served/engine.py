"""Implement GenerationEngine with a server over HTTP: token ids in, token ids and log-probabilities out.

Each request is one POST, which the server batches with others. Updates are received in this process as those of other
engines, then given to the server as a file (`weights`). A server that does not answer, or whose weights another program
has changed, ends the engine.
"""

import queue
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch

from coati_rl.errors import ConfigError, EngineError
from coati_rl.http_call import CallRefusedError, HttpCallError
from coati_rl.probe import ProbeAnswer
from coati_rl.transport.manifest import WeightManifest
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.types import GenerationRequest, GenerationResult
from producer.engines.admission import RequestRefusedError, aborted_result
from producer.engines.checkpoint import expect_update, find_checkpoint
from producer.engines.engine_thread import ThreadedEngine
from producer.engines.options import EngineOptions
from producer.engines.served.calls import ServerCalls
from producer.engines.served.identity import calls_of, check_server
from producer.engines.served.replies import ReplyError, num_choices, read_completions, send_tokens
from producer.engines.served.server import Server
from producer.engines.served.weights import ServedWeights
from producer.engines.staging import StagingArea
from producer.engines.token_stream import TokenStream

_WAIT_S = 30.0  # for a server that is being started again; three replacements wait for it
_GENERATE_S = 24 * 3600.0  # of a request, however long it waits in the server, whose health is watched
_STEP_S = 0.02  # of waiting for replies, before calls are served
_ABORT_S = 5.0  # for the tokens of an aborted request
_ABORT_AGAIN_S = 0.1  # the server may not know the request yet
_REFUSED = (400, 404, 413, 422)  # statuses that are about the request


class ServedEngine(ThreadedEngine):
    """Generate with a server of vLLM or SGLang that runs elsewhere."""

    def __init__(self, url: str, options: EngineOptions, *, policy_version: int = 0) -> None:
        """Begin to ask the server what it is; see `ThreadedEngine.wait_ready`.

        Args:
            url: of the server.
            options: its model, lengths and dtype are what the server must have; `weights_dir` is shared with it.
            policy_version: see `create_engine`.
        """
        super().__init__(_ServedCore(url, options, self._wake), policy_version=policy_version)

    def _wake(self) -> None:
        """Have the engine's thread look at its core, from any thread."""
        self._inbox.put(lambda: None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sent:
    """Hold a request that the server has, with the future of its reply."""

    request: GenerationRequest
    request_id: str  # on the server
    stream: TokenStream | None
    reply: "Future[dict[str, Any]]"


class _ServedCore:
    """Implement `EngineCore` with a server."""

    def __init__(self, url: str, options: EngineOptions, wake: Callable[[], None]) -> None:
        self.policy_version = 0
        self.identities: tuple[str, ...] = ()
        self.vocab_size = 0
        self.max_model_len = options.max_model_len
        self._options = options
        self._server = Server(url)
        self._wake = wake
        self._name = f"coati-{token_hex(8)}"  # of this engine's requests and weights on the server
        self._num_sent = 0
        self._versions: dict[str, int] = {}  # policy versions, by the server's names of its weights
        self._running: dict[str, _Sent] = {}  # by the request's id in this process
        self._probes: dict[int, tuple[tuple[int, ...], Callable[[ProbeAnswer], None], Future[dict[str, Any]]]] = {}
        self._replied: queue.SimpleQueue[str | int] = queue.SimpleQueue()  # ids of requests, numbers of probes
        self._staging = StagingArea(device=torch.device("cpu"))
        self._failure: str | None = None  # why the server is lost

    def load(self) -> None:
        from transformers import AutoConfig, AutoTokenizer

        options = self._options
        if not options.weights_dir:
            raise ConfigError(f"-b {self._server.url}: no directory for weights; a run has one, give weights_dir")
        directory = find_checkpoint(options.model)
        self._expected = expect_update(directory, options.dtype, None)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.vocab_size = AutoConfig.from_pretrained(directory).get_text_config().vocab_size
        facts = check_server(
            self._server,
            directory,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            timeout_s=_WAIT_S,
            tokenizer=self._tokenizer,
        )
        self._calls: ServerCalls = calls_of(self._server, facts)
        directory = Path(options.weights_dir).absolute()
        self._weights = ServedWeights(self._server, self._calls, directory, facts, dtype=options.dtype)
        try:
            self._calls.begin(self._version_name(self.policy_version))
        except HttpCallError as error:
            raise EngineError(f"{self._server.url}: {error}") from error
        self._server.watch(self._calls.health_path, self._lose)

    def add(self, request: GenerationRequest, stream: TokenStream | None) -> None:
        if request.lora is not None:
            raise RequestRefusedError(f"adapter {request.lora!r}: a server has none")
        server_id = self._new_id()
        max_new_tokens = min(request.sampling.max_new_tokens, self.max_model_len - len(request.token_ids))
        body = self._calls.generate_body(request, server_id, max_new_tokens=max_new_tokens)
        num_bytes = (1 << 20) + self._calls.bytes_of_token(request) * num_choices(request) * max_new_tokens
        reply = self._server.start(
            self._calls.generate_path, body, timeout_s=_GENERATE_S, max_reply_bytes=num_bytes, is_completion=True
        )
        self._running[request.request_id] = _Sent(request=request, request_id=server_id, stream=stream, reply=reply)
        reply.add_done_callback(lambda _: self._replied.put(request.request_id))

    def abort(self, request_id: str) -> GenerationResult | None:
        sent = self._running.pop(request_id, None)
        if sent is None:
            return None
        end = time.monotonic() + _ABORT_S
        while not sent.reply.done() and time.monotonic() < end:
            try:
                self._calls.abort(sent.request_id, num_choices(sent.request), timeout_s=_ABORT_S)
                sent.reply.exception(timeout=_ABORT_AGAIN_S)
            except (HttpCallError, CancelledError, TimeoutError):
                continue
        if sent.reply.cancelled() or sent.reply.cancel():  # the server ends a request whose caller has gone
            return aborted_result(sent.request)
        return self._result(sent)

    def num_running(self) -> int:
        return len(self._running) + len(self._probes) + (self._failure is not None)

    def step(self) -> list[GenerationResult]:
        results: list[GenerationResult] = []
        wait_s = _STEP_S
        while True:
            self._check()
            try:
                number = self._replied.get(timeout=wait_s)
            except queue.Empty:
                return results
            self._check()  # of a server that was lost meanwhile all replies are cancelled
            wait_s = 0.0
            if isinstance(number, int):
                self._answer(number)
            elif (sent := self._running.get(number)) is not None and sent.reply.done():
                del self._running[number]
                results.append(self._result(sent))

    def probe(self, token_ids: tuple[int, ...], answer: Callable[[ProbeAnswer], None]) -> None:
        self._num_sent += 1
        number = self._num_sent
        body = self._calls.probe_body(token_ids, self._new_id())
        reply = self._server.start(
            self._calls.generate_path,
            body,
            timeout_s=_GENERATE_S,
            max_reply_bytes=(1 << 20) + 1024 * len(token_ids),
            is_completion=False,
        )
        self._probes[number] = token_ids, answer, reply
        reply.add_done_callback(lambda _: self._replied.put(number))

    def start_staging(self, manifest: WeightManifest, rendezvous: Rendezvous, *, timeout_s: float) -> None:
        self._check()
        self._expected.check(manifest)
        self._staging.start(manifest, rendezvous, timeout_s=timeout_s)

    def poll_staging(self) -> tuple[str, ...] | None:
        staged = self._staging.poll()
        if staged is None:
            return None
        self._weights.write(staged)
        return (staged.digest,)

    def sleep(self) -> list[GenerationResult]:
        raise EngineError(f"{self._server.url} does not sleep: a server has a device of its own")

    def wake(self) -> None:
        raise EngineError(f"{self._server.url} does not sleep: a server has a device of its own")

    def commit(self, policy_version: int) -> list[GenerationResult]:
        self._check()
        staged = self._staging.take()
        probes, self._probes = list(self._probes.values()), {}
        for _, _, reply in probes:  # which may be partly computed
            reply.cancel()
        try:
            digest = self._weights.load(staged, self._version_name(policy_version))
        except EngineError as error:  # of what weights it has now is not known
            self._failure = self._failure or str(error)
            raise
        self.identities = (self._expected.identity(digest),)
        self.policy_version = policy_version
        for token_ids, answer, _ in probes:
            self.probe(token_ids, answer)
        return []

    def close(self) -> None:
        for sent in self._running.values():
            sent.reply.cancel()
        self._server.close()
        self._staging.close()
        if hasattr(self, "_weights"):
            self._weights.remove()

    def _new_id(self) -> str:
        self._num_sent += 1
        return f"{self._name}-{self._num_sent}"

    def _version_name(self, policy_version: int) -> str:
        """Return the server's name of a version's weights, from now on the only ones that it may sample with."""
        name = f"{self._name}/{policy_version}"
        self._versions[name] = policy_version
        return name

    def _lose(self, reason: str) -> None:
        """Note that the server is lost, from the server's thread."""
        self._failure = self._failure or f"the server {self._server.url} is lost: {reason}"
        self._wake()

    def _check(self) -> None:
        """Raise EngineError if the server is lost."""
        if self._failure is not None:
            raise EngineError(self._failure)

    def _result(self, sent: _Sent) -> GenerationResult:
        """Return the result of a request that was answered. Raises: EngineError, which ends the engine."""
        try:
            choices = self._calls.choices(sent.reply.result(), sent.request)
            completions = read_completions(choices, sent.request, versions=self._versions, decode=self._decode)
        except CallRefusedError as error:
            if error.status not in _REFUSED:
                raise EngineError(f"{self._server.url}: {error}") from error
            return GenerationResult(request_id=sent.request.request_id, error=f"{self._server.url}: {error}")
        except (HttpCallError, ReplyError) as error:
            raise EngineError(f"{self._server.url}: {error}") from error
        if sent.stream is not None:
            for index, completion in enumerate(completions):
                send_tokens(completion, index, sent.stream)
        return GenerationResult(request_id=sent.request.request_id, completions=completions)

    def _answer(self, number: int) -> None:
        if number not in self._probes:
            return  # it was asked again after a commit
        token_ids, answer, reply = self._probes.pop(number)
        try:
            answer(ProbeAnswer(logprobs=self._calls.prompt_logprobs(reply.result(), token_ids)))
        except (HttpCallError, ReplyError) as error:
            raise EngineError(f"{self._server.url}: a probe: {error}") from error

    def _decode(self, token_ids: Any) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text
