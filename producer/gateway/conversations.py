"""Turn the requests of a client into contexts of tokens: those that an episode has recorded, or rendered each time.

A chat is found by the identity of its messages, raw text by its beginning. What the client has changed is a branch: it
is tokenised anew, and no loss counts it.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coati_rl.errors import ConfigError, RolloutError
from coati_rl.reading.chat_template import check_options, reads, template_of
from coati_rl.reading.conversations import leading_ids
from coati_rl.types import Completion
from producer.environments.chat import ChatTemplate
from producer.environments.episode import Message
from producer.environments.recorder import Context, ConversationTree
from producer.environments.trajectories import AnswerNode
from producer.gateway.api_error import ApiError
from producer.gateway.requests import ChatRequest, CompletionRequest
from producer.gateway.session import ContextPlace
from producer.tools.call_formats import ToolCall, ToolCallFormat, answer_text, tool_format_for
from producer.tools.tool import Schema, name_of, typed_arguments


class Language:
    """Hold what text and tokens of a model have to do with each other; one object serves all conversations.

    Args:
        tokenizer: of the model, from transformers.
        template: of the same tokenizer.
        tool_format: in which the model writes calls; None: in none that is known.
    """

    def __init__(self, tokenizer: Any, template: ChatTemplate, tool_format: ToolCallFormat | None) -> None:
        self._tokenizer = tokenizer
        self.template = template
        self._tool_format = tool_format

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def encode_prompt(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of a raw prompt, which begins as the tokenizer begins texts.

        Raises: RolloutError for numbers that are no tokens.
        """
        if isinstance(prompt, str):
            return (*leading_ids(prompt, self._tokenizer), *self.template.encode(prompt))
        if not self.template.has_tokens(prompt):
            raise RolloutError("prompt: holds numbers that are no tokens of the model")
        return tuple(prompt)

    def check_tools(self, request: ChatRequest) -> None:
        """Raise RolloutError if the request offers tools, and how the model calls them is not known."""
        if request.offered_tools and self._tool_format is None:
            raise RolloutError("tools: the model's chat template writes calls in no known format; leave them out")

    def variables(self, request: ChatRequest) -> dict[str, Any]:
        """Return what a request gives to the chat template by name. Raises: ApiError for what is not its to read."""
        given, effort = request.chat_template_kwargs, request.reasoning_effort
        try:
            check_options(self._tokenizer, given, "the request")
        except ConfigError as error:
            raise ApiError(400, str(error), param="chat_template_kwargs", code="invalid_value") from error
        if effort is None:
            return given
        if not reads(template_of(self._tokenizer, request.offered_tools or ()), "reasoning_effort"):
            raise ApiError(
                400,
                "reasoning_effort: the model's chat template does not read it; leave it out, or give the variable that "
                "it reads in chat_template_kwargs",
                param="reasoning_effort",
                code="unsupported_parameter",
            )
        return {"reasoning_effort": effort, **given}

    def answer(self, completion: Completion, text: str, request: ChatRequest, *, turn: int) -> Message:
        """Return an answer as a message: its text, or the calls of the tools that the request offers."""
        if request.offered_tools and self._tool_format is not None:
            written = answer_text(self._tokenizer, completion.token_ids.tolist())
            ends = [place for mark in request.stop if (place := written.find(mark)) >= 0]
            parsed = self._tool_format.parse(written[: min(ends, default=len(written))], turn=turn)
            if parsed.calls:
                schemas = {name_of(tool): tool for tool in request.offered_tools}
                calls = [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {
                            "name": call.name,
                            "arguments": json.dumps(_arguments(call, schemas), ensure_ascii=False),
                        },
                    }
                    for call in parsed.calls
                ]
                return {"role": "assistant", "content": parsed.content, "tool_calls": calls}
        return {"role": "assistant", "content": text}


def _arguments(call: ToolCall, schemas: Mapping[str, Schema]) -> dict[str, Any]:
    """Return a call's arguments with the types of its tool; of a tool that there is not, as they were written."""
    schema = schemas.get(call.name)
    return call.arguments if schema is None else typed_arguments(schema, call.arguments)


def tool_format_or_none(tokenizer: Any, name: str) -> ToolCallFormat | None:
    """Return the format in which a model writes calls; None if it is to be found, and there is none that is known.

    Raises: ConfigError for a name that no format has.
    """
    try:
        return tool_format_for(tokenizer, name)
    except ConfigError:
        if name != "auto":
            raise
        return None  # requests with tools are then refused


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rendered:
    """Hold a context that nothing is known of but its tokens."""

    token_ids: tuple[int, ...]


class UnrecordedConversation:
    """Implement `SessionConversation` for clients without an episode: each request is rendered by itself."""

    def __init__(self, language: Language) -> None:
        self._language = language

    def chat(self, request: ChatRequest) -> ContextPlace:
        self._language.check_tools(request)
        variables = self._language.variables(request)
        tools = request.offered_tools or ()
        tokens = self._language.template.prompt(request.messages, tools=tools, variables=variables)
        return _Rendered(token_ids=tokens)

    def text(self, request: CompletionRequest) -> ContextPlace:
        return _Rendered(token_ids=self._language.encode_prompt(request.prompt))

    def parse(self, completion: Completion, text: str, request: ChatRequest) -> Message:
        return self._language.answer(completion, text, request, turn=0)

    def record(
        self, place: ContextPlace, completion: Completion, *, temperature: float, message: Message, seconds: float
    ) -> None:
        """See `Conversation`; nothing is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _TextPlace:
    """Hold the context of a raw prompt, and its text; None of a prompt that was tokens."""

    context: Context
    prompt: str | None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.context.token_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class _TextAnswer:
    """Hold a recorded answer to a raw prompt."""

    node: AnswerNode
    text: str | None  # prompt and answer as the client has them; None if they cannot be continued as text
    token_ids: tuple[int, ...]  # of that text: the node's, without a last one that is not in it


class RecordedConversation:
    """Implement `SessionConversation` and `RewardSink` for an episode, whose answers are added to its tree."""

    def __init__(self, language: Language, tree: ConversationTree) -> None:
        self._language = language
        self._tree = tree
        self._texts: list[_TextAnswer] = []
        self.last: AnswerNode | None = None  # answer that was recorded
        self.turns: list[dict[str, Any]] = []  # of each answer: its context and its tokens, for the rollout's record
        self._answered_at = time.perf_counter()  # the last call
        self._waited_s = 0.0  # from there to the call that came last: what the agent took

    def chat(self, request: ChatRequest) -> ContextPlace:
        self._waited_s = time.perf_counter() - self._answered_at
        for name in ("chat_template_kwargs", "reasoning_effort"):
            if getattr(request, name):
                reason = "turns are rendered as the episode's prompt was, with --chat-template-kwargs; leave it out"
                raise ApiError(400, f"{name}: is not supported: {reason}", param=name, code="unsupported_parameter")
        self._language.check_tools(request)
        return self._tree.find(request.messages, tools=request.offered_tools or ())

    def text(self, request: CompletionRequest) -> ContextPlace:
        """See `Conversation`. An answer's last token that is not in its text is left out, which makes a fork."""
        self._waited_s = time.perf_counter() - self._answered_at
        prompt = request.prompt
        found, token_ids = self._after_text(prompt) if isinstance(prompt, str) else self._after_tokens(prompt)
        node = None if found is None else found.node
        is_fork = self.last is not None and (node is None or token_ids[: len(node.token_ids)] != node.token_ids)
        text = self._language.template.decode(token_ids)
        context = Context(token_ids=token_ids, text=text, messages=(), node=node, is_fork=is_fork)
        return _TextPlace(context=context, prompt=prompt if isinstance(prompt, str) else None)

    def parse(self, completion: Completion, text: str, request: ChatRequest) -> Message:
        return self._language.answer(completion, text, request, turn=len(self.turns))

    def record(
        self, place: ContextPlace, completion: Completion, *, temperature: float, message: Message, seconds: float
    ) -> None:
        context = place.context if isinstance(place, _TextPlace) else place
        if not isinstance(context, Context):
            raise TypeError(f"the context of another conversation: {type(place).__name__}")
        self.last = self._tree.add(context, completion, temperature=temperature, message=message)
        noted = {"role": "assistant", "tokens": len(completion.token_ids), "seconds": round(seconds, 6)}
        noted |= {"context_tokens": len(context.token_ids), "environment_seconds": round(self._waited_s, 6)}
        self._answered_at = time.perf_counter()
        if context.node is not None:
            noted["follows"] = context.node.index  # the answer that the call was found to go on from
        if context.is_fork:
            noted["is_fork"] = True
        self.turns.append(noted)
        if isinstance(place, _TextPlace):
            self._texts.append(self._text_answer(place, self.last, message["content"]))

    def add_reward(self, name: str, value: float) -> None:
        if self.last is None:
            raise ApiError(400, "the episode has no answer yet, which a reward could be given to")
        self._tree.add_reward(self.last, name, value)

    def _after_text(self, prompt: str) -> tuple[_TextAnswer | None, tuple[int, ...]]:
        """Return the longest recorded answer that a text goes on from, and the text's tokens."""
        known = [(each, each.text) for each in self._texts if each.text is not None and prompt.startswith(each.text)]
        found, text = max(known, key=lambda pair: len(pair[1]), default=(None, ""))
        if found is None:
            return None, self._language.encode_prompt(prompt)
        return found, found.token_ids + self._language.template.encode(prompt[len(text) :])

    def _after_tokens(self, prompt: Sequence[int]) -> tuple[_TextAnswer | None, tuple[int, ...]]:
        """Return the longest recorded answer that tokens go on from, and these."""
        token_ids = self._language.encode_prompt(prompt)
        known = [each for each in self._texts if token_ids[: len(each.node.token_ids)] == each.node.token_ids]
        return max(known, key=lambda each: len(each.node.token_ids), default=None), token_ids

    def _text_answer(self, place: _TextPlace, node: AnswerNode, content: str) -> _TextAnswer:
        template, num_context = self._language.template, node.num_context
        for end in (len(node.token_ids), len(node.token_ids) - 1):
            shown = node.token_ids[num_context:end]
            if place.prompt is not None and template.decode_after(place.token_ids, shown) == content:
                return _TextAnswer(node=node, text=place.prompt + content, token_ids=node.token_ids[:end])
        return _TextAnswer(node=node, text=None, token_ids=node.token_ids)
