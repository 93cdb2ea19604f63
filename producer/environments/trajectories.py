"""Make the trajectories of an episode from its answers, which are a tree.

A trajectory is the path to a leaf. L tokens of a trajectory, N of them in the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from coati_rl.routes import routes_of
from coati_rl.types import Completion, SharedPrefix, TokenReward, Trajectory, Turn
from producer.environments.episode import Message


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AnswerNode:
    """Hold an answer and all before it; the prompt is a node without an answer."""

    token_ids: tuple[int, ...]  # int[L], the context's and the answer's
    text: str  # of these tokens, special ones included
    messages: tuple[Message, ...]  # the conversation, the answer last; empty if it is not one of messages
    num_context: int  # tokens before the answer
    parent: "AnswerNode | None" = None  # whose tokens these begin with; None: the prompt, or rendered anew
    index: int = -1  # of the answer in the episode, from 0; -1: there is none
    completion: Completion | None = None  # as the engine gave it
    temperature: float = 1.0  # that it was sampled at
    rewards: list[tuple[str, float]] = field(default_factory=list)  # by name


def make_trajectories(
    answers: Sequence[AnswerNode], prompt_ids: Sequence[int], *, episode: int
) -> tuple[Trajectory, ...]:
    """Return one trajectory for each leaf, by when the leaves were sampled.

    Each holds in its loss the answers on its path that no earlier one holds.

    Args:
        answers: in the order in which they were sampled.
        prompt_ids: of the group.
        episode: of the group, from 0.
    """
    prompt = np.array(prompt_ids, dtype=np.int32)
    owned: set[int] = set()
    found: list[Trajectory] = []
    for leaf in leaves(answers):
        own = [node for node in _path(leaf) if id(node) not in owned]
        owned.update(id(node) for node in own)
        token_ids = np.array(leaf.token_ids, dtype=np.int32)
        prefix = _shared(token_ids[: own[0].num_context], prompt, found)
        passes = [node.completion.routes for node in _path(leaf) if node.completion is not None]
        routes = routes_of(len(token_ids), passes)
        found.append(_trajectory(token_ids, own, prefix, routes, episode=episode))
    return tuple(found) if found or not prompt_ids else (_unanswered(prompt, episode=episode),)


def leaves(answers: Sequence[AnswerNode]) -> list[AnswerNode]:
    """Return the answers that no other one continues, in order: the ends of the trajectories."""
    continued = {id(node.parent) for node in answers}
    return [node for node in answers if id(node) not in continued]


def _trajectory(
    token_ids: np.ndarray,
    own: Sequence[AnswerNode],
    prefix: SharedPrefix,
    routes: np.ndarray | None,
    *,
    episode: int,
) -> Trajectory:
    """Return the trajectory of some tokens, with the answers that it owns in its loss."""
    answered = [(node, node.completion) for node in own if node.completion is not None]
    loss_mask = np.zeros(len(token_ids), dtype=bool)
    for node, _ in answered:
        loss_mask[node.num_context : len(node.token_ids)] = True
    return Trajectory(
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=np.concatenate([each.logprobs for _, each in answered]),
        policy_versions=np.concatenate([each.policy_versions for _, each in answered]),
        temperature=np.concatenate(
            [np.full(len(each.token_ids), node.temperature, dtype=np.float32) for node, each in answered]
        ),
        episode=episode,
        turns=tuple(
            Turn(index=node.index, start=node.num_context, end=len(node.token_ids), finish_reason=each.finish_reason)
            for node, each in answered
        ),
        text=answered[-1][1].text,
        prefix=prefix,
        rewards=tuple(
            TokenReward(position=max(node.num_context, len(node.token_ids) - 1), name=name, value=value)
            for node in own
            for name, value in node.rewards
        ),
        routes=routes,
    )


def _shared(context: np.ndarray, prompt: np.ndarray, earlier: Sequence[Trajectory]) -> SharedPrefix:
    """Return the longest prefix of a context that the prompt or an earlier trajectory has too."""
    prefix = SharedPrefix(num_tokens=_num_common(context, prompt))
    for index, trajectory in enumerate(earlier):
        num_common = _num_common(context, trajectory.token_ids)
        if num_common > prefix.num_tokens:
            prefix = SharedPrefix(num_tokens=num_common, parent=index)
    return prefix


def _unanswered(prompt: np.ndarray, *, episode: int) -> Trajectory:
    """Return the trajectory of an episode without an answer: an empty, aborted turn."""
    end, nothing = len(prompt), np.zeros(0, dtype=np.float32)
    return Trajectory(
        token_ids=prompt,
        loss_mask=np.zeros(end, dtype=bool),
        logprobs=nothing,
        policy_versions=nothing.astype(np.int32),
        temperature=nothing,
        episode=episode,
        turns=(Turn(index=0, start=end, end=end, finish_reason="abort"),),
        text="",
        prefix=SharedPrefix(num_tokens=end),
    )


def _path(leaf: AnswerNode) -> list[AnswerNode]:
    """Return the answers whose tokens a leaf's begin with, and the leaf, in order."""
    path = [leaf]
    while (parent := path[-1].parent) is not None and parent.completion is not None:
        path.append(parent)
    return path[::-1]


def _num_common(first: np.ndarray, other: np.ndarray) -> int:
    """Count the tokens that both begin with."""
    length = min(len(first), len(other))
    differs = np.flatnonzero(first[:length] != other[:length])
    return int(differs[0]) if len(differs) else length
