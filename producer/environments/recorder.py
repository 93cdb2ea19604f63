"""Record the answers of an episode as the engine gave them, and make its trajectories.

A node is an answer: its tokens, log-probabilities and policy versions. A context is what the engine is given for the
next one: the tokens of a node and what follows them, or a conversation that is rendered anew, a fork. Nodes are a tree;
a trajectory is a path to one of its leaves. Each sampled token is in the loss of one trajectory, and no other token is
in a loss. L tokens of a trajectory, N of them in the loss.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coati_rl.errors import RolloutError
from coati_rl.types import Completion, Trajectory
from producer.environments.chat import ChatTemplate, TemplateError, arguments_of, plain_message
from producer.environments.episode import Message, Observation
from producer.environments.trajectories import AnswerNode, leaves, make_trajectories


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Context:
    """Hold what the engine is given for an answer."""

    token_ids: tuple[int, ...]
    text: str  # of these tokens, special ones included
    messages: tuple[Message, ...]  # before the answer
    node: AnswerNode | None  # that the answer follows; None: the conversation is not known
    is_fork: bool  # rendered anew: its tokens do not begin with the node's
    answer_so_far: Message | None = None  # which the answer continues, since text or nothing was appended to it


class ConversationTree:
    """Record one episode; its answers are added in the order in which the engine gives them.

    Args:
        template: of the model.
        episode: of the group, from 0.
        prompt_ids: of the group's prompt, which trajectories share; None: what the first `start` gives.
    """

    def __init__(self, template: ChatTemplate, *, episode: int, prompt_ids: Sequence[int] | None = None) -> None:
        self._template = template
        self._episode = episode
        self._prompt_ids = None if prompt_ids is None else tuple(prompt_ids)
        self._answers: list[AnswerNode] = []
        self._by_messages: dict[tuple[object, ...], AnswerNode] = {}  # by the identities of the conversation's messages

    def start(
        self,
        token_ids: Sequence[int],
        messages: Sequence[Message] = (),
        *,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> AnswerNode:
        """Return the prompt, which an episode begins with.

        Args:
            token_ids: at least one.
            messages: that it was rendered from; empty: it is text, to which only text or tokens can be appended.
            tools: that it was rendered with; None: those of the template.
        """
        ids, plain = tuple(token_ids), tuple(plain_message(message) for message in messages)
        if self._prompt_ids is None:
            self._prompt_ids = ids
        try:
            text = self._template.render(plain, tools=tools) if plain else ""
        except TemplateError:  # a prompt of text, for a model without a template, say
            text, plain = "", ()
        if not plain or self._template.encode(text) != ids:
            text = self._template.decode(ids)
        return self._keep(AnswerNode(token_ids=ids, text=text, messages=plain, num_context=len(ids)))

    def extend(
        self, node: AnswerNode, observation: Observation = None, *, tools: Sequence[dict[str, Any]] | None = None
    ) -> Context:
        """Return the context of the next answer after an observation.

        Args:
            node: the last answer, or the prompt.
            observation: text or token ids, which are appended; messages, which the template bridges to, or for which
                the conversation is rendered anew; nothing: the policy goes on.
            tools: of the conversation; None: those of the template.
        Raises: TemplateError if the template refuses the messages or leaves one out; RolloutError for an observation
            that is none of these.
        """
        if isinstance(observation, str):
            return self._append(node, self._template.encode(observation), observation)
        items: list[Any] = [] if observation is None else list(observation)
        if not items:
            return self._append(node, (), "")
        if all(isinstance(item, Mapping) for item in items):
            return self._follow(node, items, tools)
        token_ids = tuple(item.item() if isinstance(item, np.integer) else item for item in items)
        if not self._template.has_tokens(token_ids):
            raise RolloutError(
                "an observation is neither text nor a list of messages nor of the vocabulary's token ids"
            )
        return self._append(node, token_ids, self._template.decode_after(node.token_ids, token_ids))

    def find(self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] | None = None) -> Context:
        """Return the context of the answer to a whole conversation, as a stateless client sends it.

        Its longest beginning that is recorded is found by the identity of its messages; what follows is new, also where
        it holds answers that the client has changed.

        Raises: TemplateError as `extend`.
        """
        plain = [plain_message(message) for message in messages]
        keys = tuple(identity(message) for message in plain)
        for length in range(len(keys), 0, -1):
            node = self._by_messages.get(keys[:length])
            if node is not None:
                return self._follow(node, plain[length:], tools)
        text = self._template.render(plain, tools=tools)
        return Context(
            token_ids=self._template.encode(text),
            text=text,
            messages=tuple(plain),
            node=None,
            is_fork=bool(self._answers),
        )

    def add(self, context: Context, completion: Completion, *, temperature: float, message: Message) -> AnswerNode:
        """Record an answer.

        Args:
            context: that it was sampled in.
            completion: as the engine gave it.
            temperature: that it was sampled at; 0 is greedy.
            message: the answer, as the template has to render it: text, or what was parsed from it.
        """
        sampled = tuple(completion.token_ids.tolist())
        said = plain_message(message)
        if context.answer_so_far is not None:
            said = _joined(context.answer_so_far, said)
        node = AnswerNode(
            token_ids=context.token_ids + sampled,
            text=context.text + self._template.decode_after(context.token_ids, sampled),
            messages=(*context.messages, said) if context.messages else (),
            num_context=len(context.token_ids),
            parent=None if context.is_fork else context.node,
            index=len(self._answers),
            completion=completion,
            temperature=temperature,
        )
        self._answers.append(node)
        return self._keep(node)

    def add_reward(self, node: AnswerNode, name: str, value: float) -> None:
        """Give a reward at an answer's last token."""
        if node.completion is None:
            raise ValueError("a reward is given to an answer, and the prompt is none")
        node.rewards.append((name, value))

    def trajectories(self) -> tuple[Trajectory, ...]:
        """Return one trajectory for each leaf, in the order in which the leaves were sampled, the last answer last.

        Each holds in its loss the answers on its path that no earlier one holds. What it shares with the prompt or an
        earlier trajectory, as tokens, is its shared prefix. An episode without an answer has an empty, aborted turn.
        """
        return make_trajectories(self._answers, self._prompt_ids or (), episode=self._episode)

    def conversations(self) -> list[list[Message] | str]:
        """Return what is said in each trajectory, in their order, as JSON.

        It is messages, the prompt's first; of a prompt that is text, the text of all tokens.
        """
        return [[_as_json(message) for message in leaf.messages] or leaf.text for leaf in leaves(self._answers)]

    def _append(self, node: AnswerNode, token_ids: tuple[int, ...], text: str) -> Context:
        """Append to the tokens; the next answer is part of the message that they belong to."""
        messages, so_far = node.messages, None
        if node.completion is not None and messages:
            messages, so_far = messages[:-1], {**messages[-1], "content": messages[-1]["content"] + text}
        elif text and messages:
            so_far = {"role": "assistant", "content": text}
        return Context(
            token_ids=node.token_ids + token_ids,
            text=node.text + text,
            messages=messages,
            node=node,
            is_fork=False,
            answer_so_far=so_far,
        )

    def _follow(self, node: AnswerNode, new: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> Context:
        """Return the recorded tokens and the bridge to the next answer; where there is none, a fork."""
        if not node.messages:
            raise RolloutError(
                "an observation is messages, and the prompt is text; return text or token ids from the episode"
            )
        plain = tuple(plain_message(message) for message in new)
        then = self._template.bridge(node.token_ids, node.text, node.messages, plain, tools=tools)
        is_fork = then.bridge is None
        return Context(
            token_ids=self._template.encode(then.text) if then.bridge is None else node.token_ids + then.bridge,
            text=then.text,
            messages=(*node.messages, *plain),
            node=node,
            is_fork=is_fork,
        )

    def _keep(self, node: AnswerNode) -> AnswerNode:
        if node.messages:
            self._by_messages[tuple(identity(message) for message in node.messages)] = node
        return node


def identity(message: Message) -> tuple[object, ...]:
    """Return what a message is recognised by when a client sends it back: role, content, calls, ids.

    Arguments of calls are compared as JSON, since clients write them anew; content is compared as it is.
    """
    plain = plain_message(message)
    calls = tuple(
        (call.get("id"), call["function"]["name"], json.dumps(arguments_of(call), sort_keys=True))
        for call in plain.get("tool_calls", ())
    )
    return plain["role"], plain["content"], calls, plain.get("tool_call_id")


def _as_json(message: Message) -> Message:
    """Return a message whose fields JSON can hold; else its role and content alone."""
    try:
        json.dumps(message)
    except (TypeError, ValueError, RecursionError):  # a user's environment may add what it likes
        return {"role": message["role"], "content": message["content"]}
    return message


def _joined(first: Message, then: Message) -> Message:
    """Return one message of an answer and what the policy continues it with."""
    calls = [*first.get("tool_calls", ()), *then.get("tool_calls", ())]
    message = {**first, **then, "content": first["content"] + then["content"]}
    return {**message, "tool_calls": calls} if calls else message
