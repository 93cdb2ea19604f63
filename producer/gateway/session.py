"""Answer the calls of one client of the gateway: sample, parse tool calls, record, and end them all.

In: requests. Out: answers, as they are sampled and whole. The gateway's event loop uses it, and the engine's thread the
listener of a request. An answer is recorded when it is whole; one whose client has gone, or whose episode has ended, is
aborted in the engine before that and leaves nothing behind.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, cast

from coati_rl.errors import ContextLengthError, RolloutError, RunError
from coati_rl.protocols import OnTokens
from coati_rl.types import Completion, TokenChunk
from producer.environments.episode import Message
from producer.gateway.api_error import ApiError
from producer.gateway.requests import ChatRequest, CompletionRequest
from producer.gateway.sampling_rules import SamplingRules
from producer.gateway.text_stream import TextStream

OnText = Callable[[int, str, TokenChunk], None]  # index of the sample, new text (may be empty), the tokens


class Sample(Protocol):
    """Ask the engine for samples; cancelled, it aborts them."""

    async def __call__(
        self, token_ids: Sequence[int], *, num_samples: int, sampling: Mapping[str, Any], on_tokens: OnTokens | None
    ) -> tuple[Completion, ...]:
        """See `producer.environments.environment.Generate`."""


class ContextPlace(Protocol):
    """Hold a context that the engine is given, and where in the conversation it is."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Return the tokens of the context."""


class SessionConversation(Protocol):
    """Turn requests into contexts, and keep what was sampled in them."""

    def chat(self, request: ChatRequest) -> ContextPlace:
        """Return the context of messages. Raises: RolloutError if the template cannot render them."""

    def text(self, request: CompletionRequest) -> ContextPlace:
        """Return the context of raw text or tokens. Raises: RolloutError for tokens that there are not."""

    def parse(self, completion: Completion, text: str, request: ChatRequest) -> Message:
        """Return an answer as a message: `text` as its content, or the calls of tools that the request offers."""

    def record(
        self, place: ContextPlace, completion: Completion, *, temperature: float, message: Message, seconds: float
    ) -> None:
        """Keep an answer, which the engine took some seconds for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Hold one sample of a request: what the client gets."""

    message: Message
    completion: Completion

    @property
    def finish_reason(self) -> str:
        """Return why it ended, in OpenAI's words."""
        return "tool_calls" if self.message.get("tool_calls") else self.completion.finish_reason


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSamples:
    """Hold all samples of a request."""

    num_prompt_tokens: int
    choices: tuple[Answer, ...]


class Session:
    """Answer the calls of an episode, or of a client without one; see `close`."""

    def __init__(
        self,
        conversation: SessionConversation,
        sample: Sample,
        rules: SamplingRules,
        *,
        decode: Callable[[Sequence[int]], str],
        max_in_flight: int,
        max_waiting: int = 0,
    ) -> None:
        """Begin without calls.

        Args:
            conversation: makes contexts and keeps answers.
            sample: asks the engine.
            rules: of sampling.
            decode: returns the text of token ids, special tokens left out.
            max_in_flight: calls that are sampled at a time.
            max_waiting: calls that wait for these; further ones are refused with 429, which clients repeat.
        """
        self._conversation = conversation
        self._sample = sample
        self._rules = rules
        self.decode = decode
        self._max_calls = max_in_flight + max_waiting
        self._turns = asyncio.Semaphore(max_in_flight)
        self._calls: set[asyncio.Task[Any]] = set()
        self.fault: str | None = None  # why the engine or the gateway has failed a call that the client may make
        self._is_closed = False

    async def call(self, request: ChatRequest | CompletionRequest, on_text: OnText | None = None) -> RequestSamples:
        """Sample the answers of a request and record them.

        Args:
            request: of a client.
            on_text: called in this event loop with each sample's text as it is sampled.
        Raises: ApiError.
        """
        with self._tracked(), _translated():
            async with self._turns:
                changes, talk = self._rules.changes(request), self._conversation
                place = talk.chat(request) if isinstance(request, ChatRequest) else talk.text(request)
                texts = [TextStream(self.decode, request.stop) for _ in range(request.n)]
                begin = time.perf_counter()
                on_tokens = _listener(texts, on_text) if on_text is not None else None
                completions = await self._sampled(place, request.n, changes, on_tokens)
                seconds = time.perf_counter() - begin
                temperature = changes.get("temperature", self._rules.sampling.temperature)
                choices = []
                for completion, text in zip(completions, texts, strict=True):
                    text.finish(completion.token_ids.tolist())
                    message: Message = {"role": "assistant", "content": text.text}
                    if isinstance(request, ChatRequest):
                        message = talk.parse(completion, text.text, request)
                    talk.record(place, completion, temperature=temperature, message=message, seconds=seconds)
                    choices.append(Answer(message=message, completion=completion))
                return RequestSamples(num_prompt_tokens=len(place.token_ids), choices=tuple(choices))

    async def _sampled(
        self, place: ContextPlace, num_samples: int, changes: dict[str, Any], on_tokens: OnTokens | None
    ) -> tuple[Completion, ...]:
        """Ask the engine. Raises: ApiError(503) if it fails, which is noted; ContextLengthError; RunError."""
        try:
            completions = await self._sample(
                place.token_ids, num_samples=num_samples, sampling=changes, on_tokens=on_tokens
            )
        except ContextLengthError:
            raise
        except RolloutError as error:
            self.fault = str(error)
            raise ApiError(503, self.fault, is_final=True) from error
        if any(completion.finish_reason == "abort" for completion in completions):
            self.fault = "the engine has ended the request"
            raise ApiError(503, self.fault, is_final=True)
        return completions

    def close(self) -> None:
        """Refuse further calls, and end those in flight: their clients get 503, their requests are aborted."""
        self._is_closed = True
        for call in self._calls:
            call.cancel()

    def check_open(self) -> None:
        """Raise ApiError(503) if it is closed."""
        if self._is_closed:
            raise ApiError(503, "the episode has ended", code="episode_ended", is_final=True)

    @contextmanager
    def _tracked(self) -> Iterator[None]:
        self.check_open()
        if len(self._calls) >= self._max_calls:
            raise ApiError(429, f"{self._max_calls} calls of this client are in flight; wait for one of them")
        call = cast("asyncio.Task[Any]", asyncio.current_task())
        self._calls.add(call)
        try:
            yield
        except asyncio.CancelledError:
            if self._is_closed:
                call.uncancel()
                self.check_open()
            raise
        except ApiError:
            raise
        except Exception as error:
            self.fault = f"internal error of the gateway: {type(error).__name__}"
            raise
        finally:
            self._calls.discard(call)


@contextmanager
def _translated() -> Iterator[None]:
    """Raise what the engine and the template raise as an ApiError."""
    try:
        yield
    except ContextLengthError as error:
        raise ApiError(400, str(error), code="context_length_exceeded") from error
    except RolloutError as error:
        raise ApiError(400, str(error), code="invalid_request") from error
    except RunError as error:
        raise ApiError(503, str(error), is_final=True) from error


def _listener(texts: Sequence[TextStream], on_text: OnText) -> OnTokens:
    """Return what the engine's thread calls with new tokens; it has the event loop go on with them."""
    loop = asyncio.get_running_loop()

    def deliver(chunk: TokenChunk) -> None:
        on_text(chunk.index, texts[chunk.index].push(chunk.token_ids.tolist()), chunk)

    def listen(chunk: TokenChunk) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(deliver, chunk)

    return listen
