"""Write replies as OpenAI's API does: whole ones, and the chunks of a stream.

`created` is in seconds since 1970. Log-probabilities are in nats, of the distribution that was sampled from.
"""

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coati_rl.types import TokenChunk
from producer.gateway.requests import ChatRequest, CompletionRequest
from producer.gateway.served_models import ServedModel
from producer.gateway.session import Answer, RequestSamples

Decode = Callable[[Sequence[int]], str]


class ReplyWriter:
    """Write the replies to one request; all its chunks have the same id."""

    def __init__(self, request: ChatRequest | CompletionRequest, *, model: ServedModel, decode: Decode) -> None:
        """Take the request, the model that answers it and what returns the text of a token."""
        self._request = request
        self._is_chat = isinstance(request, ChatRequest)
        self._decode = decode
        self._num_characters: dict[int, int] = {}  # by sample: sent, for text_offset
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model or model.name,
            **({} if model.fingerprint is None else {"system_fingerprint": model.fingerprint}),
        }

    def whole(self, answers: RequestSamples) -> dict[str, Any]:
        """Return the reply without a stream."""
        choices = [self._choice(index, answer) for index, answer in enumerate(answers.choices)]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": _usage(answers)}

    def first(self, index: int) -> dict[str, Any]:
        """Return the chunk that begins a sample of a chat."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def piece(self, index: int, text: str, chunk: TokenChunk) -> dict[str, Any]:
        """Return the chunk of some new text and tokens."""
        logprobs = self._logprobs(index, chunk.token_ids, chunk.logprobs)
        return self._chunk(index, {"delta": {"content": text}} if self._is_chat else {"text": text}, logprobs)

    def last(self, index: int, answer: Answer, rest: str) -> dict[str, Any]:
        """Return the chunk that ends a sample, with the text that is left and the tool calls."""
        if not self._is_chat:
            return self._chunk(index, {"text": rest}, finish_reason=answer.finish_reason)
        delta: dict[str, Any] = {"content": rest} if rest else {}
        if calls := answer.message.get("tool_calls"):
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
        return self._chunk(index, {"delta": delta}, finish_reason=answer.finish_reason)

    def usage(self, answers: RequestSamples) -> dict[str, Any]:
        """Return the chunk after the last choice, where stream_options ask for it."""
        return {**self._head, "object": self._chunk_kind, "choices": [], "usage": _usage(answers)}

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        completion = answer.completion
        told: dict[str, Any] = {"index": index, "finish_reason": answer.finish_reason}
        told["logprobs"] = self._logprobs(index, completion.token_ids, completion.logprobs)
        if not self._is_chat:
            return told | {"text": answer.message["content"]}
        calls = answer.message.get("tool_calls")
        message = answer.message | {"content": answer.message["content"] or None} if calls else answer.message
        return told | {"message": message | {"refusal": None}}

    def _chunk(
        self, index: int, told: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, **told, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._head, "object": self._chunk_kind, "choices": [choice]}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _logprobs(self, index: int, token_ids: np.ndarray, logprobs: np.ndarray) -> dict[str, Any] | None:
        if not self._request.with_logprobs:
            return None
        tokens = [self._decode([token]) for token in token_ids.tolist()]
        values = [float(value) for value in logprobs]
        if self._is_chat:
            content = [_told_token(token, value) for token, value in zip(tokens, values, strict=True)]
            return {"content": content, "refusal": None}
        offsets = []
        for token in tokens:
            offsets.append(self._num_characters.get(index, 0))
            self._num_characters[index] = offsets[-1] + len(token)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


def _told_token(token: str, logprob: float) -> dict[str, Any]:
    is_part = "\ufffd" in token  # of a character, whose bytes are not known
    return {"token": token, "logprob": logprob, "bytes": None if is_part else [*token.encode()], "top_logprobs": []}


def _usage(answers: RequestSamples) -> dict[str, int]:
    num_sampled = sum(len(answer.completion.token_ids) for answer in answers.choices)
    return {
        "prompt_tokens": answers.num_prompt_tokens,
        "completion_tokens": num_sampled,
        "total_tokens": answers.num_prompt_tokens + num_sampled,
    }
