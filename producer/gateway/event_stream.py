"""Send the answers of a call as they are sampled, as server-sent events.

Consumes: the text of each sample, in the event loop. Waits for: the next piece, or the call's end. Is unblocked by: the
engine's listener, the call's task. Produces: the events of a reply, "[DONE]" last; after an error in the middle of it,
the error.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from coati_rl.types import TokenChunk
from producer.gateway.api_error import ApiError
from producer.gateway.replies import ReplyWriter
from producer.gateway.requests import ChatRequest, CompletionRequest
from producer.gateway.session import RequestSamples, Session


class EventStream:
    """Run one call; `close` ends it."""

    def __init__(self, session: Session, request: ChatRequest | CompletionRequest, writer: ReplyWriter) -> None:
        self._request = request
        self._writer = writer
        self._is_chat = isinstance(request, ChatRequest)
        # What looks like text may turn out to be a call of a tool: it is sent when the answer is whole.
        self._holds_text = isinstance(request, ChatRequest) and request.offered_tools is not None
        self._queue: asyncio.Queue[tuple[int, str, TokenChunk] | None] = asyncio.Queue()
        self._num_sent: dict[int, int] = {}  # characters, by sample that was begun
        self._call = asyncio.ensure_future(session.call(request, self._put))
        self._call.add_done_callback(self._end_queue)
        self._first: tuple[int, str, TokenChunk] | None = None

    async def begin(self) -> None:
        """Wait for the first token. Raises: ApiError if the call fails before that."""
        self._first = await self._queue.get()
        if self._first is None and not self._call.cancelled() and (error := self._call.exception()) is not None:
            raise error

    async def events(self) -> AsyncIterator[str]:
        """Yield the events of the reply; after `begin`."""
        item = self._first
        while item is not None:
            for chunk in self._piece(*item):
                yield _event(chunk)
            item = await self._queue.get()
        try:
            answers = await self._call
        except ApiError as error:
            yield _event(error.body)
            return
        for chunk in self._end(answers):
            yield _event(chunk)
        yield "data: [DONE]\n\n"

    def close(self) -> None:
        """End the call if it is not done."""
        self._call.cancel()

    def _end_queue(self, call: "asyncio.Task[RequestSamples]") -> None:
        _ = call.cancelled() or call.exception()  # else asyncio logs that nobody has looked at it
        self._queue.put_nowait(None)

    def _put(self, index: int, text: str, chunk: TokenChunk) -> None:
        self._queue.put_nowait((index, text, chunk))

    def _piece(self, index: int, text: str, chunk: TokenChunk) -> Iterator[dict[str, Any]]:
        is_first = index not in self._num_sent
        if is_first and self._is_chat:
            yield self._writer.first(index)
        shown = "" if self._holds_text else text
        self._num_sent[index] = self._num_sent.get(index, 0) + len(shown)
        if shown or self._request.with_logprobs or (is_first and not self._is_chat):
            yield self._writer.piece(index, shown, chunk)

    def _end(self, answers: RequestSamples) -> Iterator[dict[str, Any]]:
        for index, answer in enumerate(answers.choices):
            if index not in self._num_sent and self._is_chat:
                yield self._writer.first(index)
            yield self._writer.last(index, answer, answer.message["content"][self._num_sent.get(index, 0) :])
        if self._request.stream_options.include_usage:
            yield self._writer.usage(answers)


def _event(told: dict[str, Any]) -> str:
    return f"data: {json.dumps(told)}\n\n"
