"""Render conversations with a model's chat template, and continue recorded tokens by what it writes next.

An answer that the policy sampled is never tokenised again. The next context is the recorded tokens plus a bridge: what
the template writes after the recorded text, from the token that ends the turn to the next generation prompt. Where the
template writes the conversation in another way than it was recorded there is no bridge, and the context is a fork.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from coati_rl.errors import RolloutError
from coati_rl.reading.conversations import leading_ids
from producer.environments.episode import Message

_SENTINEL = "qzjsentinelqzj"  # without white space, which templates trim
_CALL_ID = "call00000"  # as Mistral's template wants it: nine letters and digits
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)  # of a template's expressions


class TemplateError(RolloutError):
    """Report that the chat template refuses a conversation, or leaves a message of it out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """Hold a conversation as the template writes it, up to where the policy answers."""

    text: str
    bridge: tuple[int, ...] | None  # tokens after the recorded ones; None: the text does not begin as the record does


class ChatTemplate:
    """Render messages with a tokenizer's chat template; one object serves all episodes of a producer.

    Messages are those of OpenAI's API. Content may be text or a list of text parts; arguments of tool calls are given
    to the template as objects, and as JSON text if it takes no objects (DeepSeek-V3).

    Args:
        tokenizer: of the model, from transformers.
        tools: schemas in OpenAI's form, for conversations that name none.
        writes_messages: False: prompts are text (--input-template), which only text and tokens can follow.
    """

    def __init__(self, tokenizer: Any, *, tools: Sequence[dict[str, Any]] = (), writes_messages: bool = True) -> None:
        self._tokenizer = tokenizer
        self.tools = tuple(tools)
        self._writes_messages = writes_messages
        # The tokenizer splits text at these before all else: no merge crosses their boundaries.
        self._added = frozenset(tokenizer.added_tokens_decoder)
        self._num_tokens = len(tokenizer)
        self._takes_objects = True  # as arguments of tool calls
        self._written: set[tuple[object, ...]] = set()  # kinds of new messages that the template was seen to write

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: at least one.
            tools: in place of the object's own; empty: none.
            add_generation_prompt: end where the policy answers.
            variables: of the template, such as enable_thinking, by name.
        Raises: TemplateError if the template refuses them.
        """
        if not self._writes_messages:
            raise TemplateError("messages cannot be written with --input-template; return text or token ids")
        plain = [plain_message(message) for message in messages]
        has_calls = any("tool_calls" in message for message in plain)
        used = list(self.tools if tools is None else tools) or None

        def rendered(*, takes_objects: bool) -> str:
            given = [_with_arguments(message, as_objects=takes_objects) for message in plain]
            return str(
                self._tokenizer.apply_chat_template(
                    given, tools=used, add_generation_prompt=add_generation_prompt, tokenize=False, **variables or {}
                )
            )

        try:
            return rendered(takes_objects=self._takes_objects)
        except _REFUSALS as error:
            if has_calls:
                try:
                    text = rendered(takes_objects=not self._takes_objects)
                except _REFUSALS:
                    pass  # the first refusal says more
                else:
                    self._takes_objects = not self._takes_objects
                    return text
            roles = ", ".join(str(message["role"]) for message in plain)
            raise TemplateError(f"the model's chat template refuses messages of the roles {roles}: {error}") from error

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Return the tokens of a conversation, up to where the policy answers. Raises: TemplateError."""
        return self.encode(self.render(messages, tools=tools, variables=variables))

    def encode(self, text: str) -> tuple[int, ...]:
        """Return a text's tokens, none added before or after it."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text that an episode begins with, as the dataset's prompts are tokenised."""
        before = () if self._writes_messages else leading_ids(text, self._tokenizer)
        return (*before, *self.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def decode_after(self, before: Sequence[int], token_ids: Sequence[int]) -> str:
        """Return the text that tokens add to those before; decoders drop the space at the beginning of a text."""
        anchor = list(before[-1:])
        head, whole = self.decode(anchor), self.decode([*anchor, *token_ids])
        return whole[len(head) :] if whole.startswith(head) else self.decode(token_ids)

    def has_tokens(self, token_ids: Sequence[int]) -> bool:
        """Return True if all of these are tokens of the vocabulary."""
        return all(isinstance(each, int) and 0 <= each < self._num_tokens for each in token_ids)

    def bridge(
        self,
        token_ids: Sequence[int],
        text: str,
        messages: Sequence[Message],
        new: Sequence[Message] = (),
        *,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> Continuation:
        """Continue a record by what the template writes after it.

        Args:
            token_ids: recorded, the policy's last answer at their end.
            text: of these tokens.
            messages: of the record; that of the last answer stands for what was sampled.
            new: that follow.
            tools: as in `render`.
        Returns: the conversation's text, and the bridge. It begins with the token that ends a turn, unless the policy
            has sampled that. No bridge if the text does not begin as the record does, or goes on within a token.
        Raises: TemplateError if the template refuses the messages, or leaves a new one out.
        """
        self._check_written(messages, new, tools)
        whole = self.render([*messages, *new], tools=tools)
        return Continuation(text=whole, bridge=self._after(token_ids, text, whole))

    def _after(self, token_ids: Sequence[int], text: str, whole: str) -> tuple[int, ...] | None:
        if not whole.startswith(text):
            return None
        rest = whole[len(text) :]
        if not rest:
            return ()
        anchor = [each for each in token_ids[-1:] if each in self._added]  # it may take white space after it along
        tokens = self.encode(self.decode(anchor) + rest)
        if anchor:
            return tokens[1:] if list(tokens[:1]) == anchor else None
        return tokens if tokens[0] in self._added else None

    def _check_written(
        self, messages: Sequence[Message], new: Sequence[Message], tools: Sequence[dict[str, Any]] | None
    ) -> None:
        """Check, once for each kind of message, that the template writes it: some leave out what they do not know."""
        *before, last = messages
        calls = last.get("tool_calls", ())
        kind = len(calls), tuple(message["role"] for message in new), bool(self.tools if tools is None else tools)
        if kind in self._written:
            return
        named = [{**call, "function": {**call["function"], "name": f"{_SENTINEL}{n}c"}} for n, call in enumerate(calls)]
        marked = [
            message if message["role"] == "assistant" else {**message, "content": f"{_SENTINEL}{n}m"}
            for n, message in enumerate(new)
        ]
        text = self.render([*before, {**last, "tool_calls": named}, *marked], tools=tools)
        what = [f"a message of the role {message['role']!r}" for message in new if message["role"] != "assistant"]
        signs = [message["content"] for message in marked if message["role"] != "assistant"]
        what += ["the policy's tool calls"] * len(named)
        signs += [call["function"]["name"] for call in named]
        missing = [name for name, sign in zip(what, signs, strict=True) if sign not in text]
        if missing:
            raise TemplateError(
                f"the model's chat template leaves out {missing[0]}, which the policy would not read; use a model or a "
                "--chat-template that writes this, or write it as text in a message of the role user or assistant"
            )
        self._written.add(kind)


def check_template(template: ChatTemplate, *, roles: Sequence[str] = ("user",)) -> None:
    """Check before a run that the template writes observations of these roles, in two turns, and the object's tools.

    Raises: TemplateError that names what it refuses or leaves out.
    """
    opening: list[Message] = [{"role": "user", "content": "question"}]
    names = [str(tool["function"]["name"]) for tool in template.tools]
    if missing := [name for name in names if name not in template.render(opening)]:
        raise TemplateError(f"the model's chat template leaves out the tool {missing[0]!r}; use one that writes tools")
    for role in roles:
        messages = list(opening)
        for turn in ("first", "second"):
            answer: Message = {"role": "assistant", "content": f"{turn} answer"}
            new: Message = {"role": role, "content": f"{turn} observation"}
            if role == "tool":
                name = names[0] if names else "tool"
                call = {"id": _CALL_ID, "type": "function", "function": {"name": name, "arguments": {}}}
                answer |= {"content": "", "tool_calls": [call]}  # Mistral's takes no content beside calls
                new |= {"tool_call_id": _CALL_ID, "name": name}
            messages.append(answer)
            record = template.render(messages, add_generation_prompt=False)
            template.bridge((), record, messages, [new])
            messages.append(new)


def plain_message(message: Message) -> Message:
    """Return a message with content as text and without keys that hold nothing; calls have an id, a type, a function.

    Raises: RolloutError for content that is no text, or what is no message.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RolloutError(f'a message is not {{"role": ..., "content": text}}: {str(message)[:200]}')
    kept = {key: value for key, value in message.items() if value is not None}
    content = kept.get("content", "")
    if isinstance(content, list | tuple):
        content = "\n".join(_text_of_part(part) for part in content)
    if not isinstance(content, str):
        raise RolloutError(f"a message of the role {kept['role']!r} has content of the type {type(content).__name__}")
    kept["content"] = content
    if calls := kept.pop("tool_calls", None):
        kept["tool_calls"] = [_plain_call(call) for call in calls]
    return kept


def arguments_of(call: Mapping[str, Any]) -> Any:
    """Return the arguments of a call as an object; the text itself if it is not JSON."""
    arguments = call["function"].get("arguments") or {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _plain_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RolloutError(f'a tool call is not {{"id": ..., "function": {{"name": ...}}}}: {str(call)[:200]}')
    return {"type": "function", **call}


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RolloutError(f"a message has a part of the type {kind!r}; only text is supported")


def _with_arguments(message: Message, *, as_objects: bool) -> Message:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = arguments_of(call)
        if not as_objects and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}
