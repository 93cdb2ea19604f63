"""Pack a rollout group for the coordinator and for a checkpoint, without the prompt, which both know.

It holds the tokens after the shared prefix of all trajectories, concatenated (N tokens), and the arrays of the M tokens
in the loss. Arrays that are constant over many tokens are run-length encoded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from coati_rl.frozen import unchecked
from coati_rl.routes import routes_of, unknown_like
from coati_rl.run_lengths import Runs, decode_runs, encode_runs, slices
from coati_rl.types import (
    Baseline,
    FinishReason,
    Prompt,
    RolloutGroup,
    Score,
    SharedPrefix,
    TokenReward,
    Trajectory,
    Turn,
)

_PACKED, _ARRAYS = "packed", "arrays"  # in the cache of a group


class PackedTurn(NamedTuple):
    """Say where a turn of the policy is, in tokens after the shared prefix."""

    number: int
    start: int
    end: int
    finish_reason: FinishReason


class PackedReward(NamedTuple):
    """Say what an environment gave at a token after the shared prefix."""

    position: int
    name: str
    value: float


class PackedTrajectory(NamedTuple):
    """Hold all of a trajectory but its arrays."""

    episode: int
    parent: int | None
    num_shared: int | None  # tokens of the parent's, or of the prompt's; None: all of them
    num_tokens: int  # after these
    turns: tuple[PackedTurn, ...]
    rewards: tuple[PackedReward, ...]
    text: str

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> "PackedTrajectory":
        """Read what `to_json` has returned."""
        turns = tuple(PackedTurn(*turn) for turn in fields["turns"])
        rewards = tuple(PackedReward(*reward) for reward in fields["rewards"])
        return cls(**{**fields, "turns": turns, "rewards": rewards})

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return self._asdict()


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedGroup:
    """Hold a rollout group without its prompt and temperature, which its lease has; see `RolloutGroup`."""

    lease_id: int
    producer_id: int
    token_ids: np.ndarray  # int32[N]
    logprobs: np.ndarray  # float32[M], nats
    loss_mask: Runs  # of N
    policy_versions: Runs  # of M
    temperature: Runs  # of M
    trajectories: tuple[PackedTrajectory, ...]
    scores: tuple[Score, ...]  # G
    records: tuple[dict[str, Any], ...] = ()  # G or none, as of `RolloutGroup`
    baseline: Baseline | None = None
    routes: np.ndarray | None = None  # uint[P + N, D, K], of the prompt's tokens and these; see `coati_rl.routes`

    @classmethod
    def pack(cls, group: RolloutGroup) -> "PackedGroup":
        """Pack a group; see `unpack`."""
        trajectories = group.trajectories
        own = [slice(each.prefix.num_tokens, None) for each in trajectories]
        pairs = [*zip(trajectories, own, strict=True)]
        return cls(
            lease_id=group.lease_id,
            producer_id=group.producer_id,
            token_ids=np.concatenate([each.token_ids[part] for each, part in pairs]),
            logprobs=np.concatenate([each.logprobs for each in trajectories]),
            loss_mask=encode_runs(np.concatenate([each.loss_mask[part] for each, part in pairs])),
            policy_versions=encode_runs(group.policy_versions),
            temperature=encode_runs(np.concatenate([each.temperature for each in trajectories])),
            trajectories=tuple(_pack(each, group) for each in trajectories),
            scores=group.scores,
            records=group.records,
            baseline=group.baseline,
            routes=_pack_routes(group),
        )

    def unpack(self, prompt: Prompt, *, temperature: float) -> RolloutGroup:
        """Restore the group from its lease's prompt and temperature.

        The trajectories of a group of single answers are restored when one of them is first read, as its record does.
        Samples and statistics need only `GroupArrays`.

        Raises: ValueError if arrays and description do not match.
        """
        num_tokens = sum(each.num_tokens for each in self.trajectories)
        num_loss = sum(length for is_in_loss, length in self.loss_mask if is_in_loss)
        runs = (self.loss_mask, self.policy_versions, self.temperature)
        mask, versions, temperatures = (sum(length for _, length in each) for each in runs)
        lengths = len(self.token_ids), mask, len(self.logprobs), versions, temperatures
        if lengths != (num_tokens, num_tokens, num_loss, num_loss, num_loss):
            raise ValueError(f"{num_tokens} tokens, {num_loss} in the loss, and arrays of {lengths}")
        if self.routes is not None and len(self.routes) != len(prompt.token_ids) + num_tokens:
            raise ValueError(f"{num_tokens} tokens after {len(prompt.token_ids)}, and routes of {len(self.routes)}")
        fields: dict[str, Any] = {
            "lease_id": self.lease_id,
            "producer_id": self.producer_id,
            "prompt": prompt,
            "temperature": temperature,
            "scores": self.scores,
            "records": self.records,
            "baseline": self.baseline,
        }
        if not self._holds_single_answers(prompt):
            group = RolloutGroup(**fields, trajectories=self._restore(prompt))
            group.cache[_PACKED] = self
            return group
        trajectories = _RestoredWhenRead(partial(self._restore, prompt), num_trajectories=len(self.trajectories))
        return unchecked(RolloutGroup, **fields, trajectories=trajectories, cache={_PACKED: self})

    def _holds_single_answers(self, prompt: Prompt) -> bool:
        """Return True if each episode is the whole prompt and one answer: what is restored then passes all checks."""
        return (
            bool(self.scores)
            and len(prompt.token_ids) > 0
            and [each.episode for each in self.trajectories] == [*range(len(self.scores))]
            and all(
                each.parent is None
                and each.num_shared is None
                and len(each.turns) == 1
                and each.turns[0].start == 0 <= each.turns[0].end == each.num_tokens
                for each in self.trajectories
            )
        )

    def _restore(self, prompt: Prompt) -> tuple[Trajectory, ...]:
        arrays = GroupArrays.of(self)
        prompt_ids = np.array(prompt.token_ids, dtype=np.int32)
        of_prompt, of_own = (None, None) if self.routes is None else np.split(self.routes, [len(prompt_ids)])
        trajectories: list[Trajectory] = []
        for packed, own, counted in zip(self.trajectories, arrays.own, arrays.counted, strict=True):
            parent = packed.parent
            shared_ids = (prompt_ids if parent is None else trajectories[parent].token_ids)[: packed.num_shared]
            parts = {
                "token_ids": np.concatenate([shared_ids, arrays.token_ids[own]]),
                "loss_mask": np.concatenate([np.zeros(len(shared_ids), dtype=bool), arrays.loss_mask[own]]),
                "logprobs": arrays.logprobs[counted],
                "policy_versions": arrays.policy_versions[counted],
                "temperature": arrays.temperature[counted],
            }
            of_shared = of_prompt if parent is None else trajectories[parent].routes
            if of_shared is not None and of_own is not None:
                parts["routes"] = np.concatenate([of_shared[: len(shared_ids)], of_own[own]])
            trajectories.append(_unpack(packed, len(shared_ids), parts))
        return tuple(trajectories)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupArrays:
    """Hold a packed group's arrays, decoded, and each trajectory's part of them."""

    token_ids: np.ndarray  # int32[N]
    loss_mask: np.ndarray  # bool[N]
    logprobs: np.ndarray  # float32[M], nats
    policy_versions: np.ndarray  # int32[M]
    temperature: np.ndarray  # float32[M]
    own: Sequence[slice]  # of N
    counted: Sequence[slice]  # of M

    @classmethod
    def of(cls, packed: PackedGroup) -> "GroupArrays":
        """Decode the arrays of a group."""
        mask = decode_runs(packed.loss_mask, bool)
        own = slices(each.num_tokens for each in packed.trajectories)
        is_all_in_loss = len(packed.logprobs) == len(mask)
        return cls(
            token_ids=packed.token_ids,
            loss_mask=mask,
            logprobs=packed.logprobs,
            policy_versions=decode_runs(packed.policy_versions, np.int32),
            temperature=decode_runs(packed.temperature, np.float32),
            own=own,
            counted=own if is_all_in_loss else slices(int(np.count_nonzero(mask[part])) for part in own),
        )


class _RestoredWhenRead(Sequence[Trajectory]):
    """Restore trajectories when one of them is first read."""

    def __init__(self, restore: Callable[[], tuple[Trajectory, ...]], *, num_trajectories: int) -> None:
        self._restore = restore
        self._num = num_trajectories
        self._restored: tuple[Trajectory, ...] | None = None

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: Any) -> Any:
        if self._restored is None:
            self._restored = self._restore()
        return self._restored[index]


def as_packed(group: RolloutGroup) -> PackedGroup:
    """Return a group as it was received, or packed once."""
    found: PackedGroup | None = group.cache.get(_PACKED)
    if found is None:
        found = group.cache[_PACKED] = PackedGroup.pack(group)
    return found


def group_arrays(group: RolloutGroup) -> GroupArrays:
    """Return the arrays of a group, decoded once."""
    found: GroupArrays | None = group.cache.get(_ARRAYS)
    if found is None:
        found = group.cache[_ARRAYS] = GroupArrays.of(as_packed(group))
    return found


def _pack(trajectory: Trajectory, group: RolloutGroup) -> PackedTrajectory:
    """Return all but the arrays; positions are counted from the end of the shared prefix."""
    shared, parent = trajectory.prefix.num_tokens, trajectory.prefix.parent
    num_there = len(group.prompt.token_ids) if parent is None else len(group.trajectories[parent].token_ids)
    return PackedTrajectory(
        episode=trajectory.episode,
        parent=parent,
        num_shared=None if shared == num_there else shared,
        num_tokens=len(trajectory.token_ids) - shared,
        turns=tuple(
            PackedTurn(turn.index, turn.start - shared, turn.end - shared, turn.finish_reason)
            for turn in trajectory.turns
        ),
        rewards=tuple(
            PackedReward(reward.position - shared, reward.name, reward.value) for reward in trajectory.rewards
        ),
        text=trajectory.text,
    )


def _pack_routes(group: RolloutGroup) -> np.ndarray | None:
    """Return the routes of the prompt, of the first episode that knows them, and of each trajectory's own tokens."""
    trajectories = group.trajectories
    of_prompt = routes_of(
        len(group.prompt.token_ids),
        [
            each.routes[: each.prefix.num_tokens]
            for each in trajectories
            if each.routes is not None and each.prefix.parent is None
        ],
    )
    if of_prompt is None:
        return None
    whole = [
        unknown_like(len(each.token_ids), of_prompt) if each.routes is None else each.routes for each in trajectories
    ]
    own = [routes[each.prefix.num_tokens :] for routes, each in zip(whole, trajectories, strict=True)]
    joined: np.ndarray = np.concatenate([of_prompt, *own])
    return joined


def _unpack(packed: PackedTrajectory, shared: int, arrays: dict[str, np.ndarray]) -> Trajectory:
    """Restore what `_pack` returned; `shared` is the number of tokens of the prefix."""
    return Trajectory(
        **arrays,
        episode=packed.episode,
        turns=tuple(
            Turn(index=turn.number, start=shared + turn.start, end=shared + turn.end, finish_reason=turn.finish_reason)
            for turn in packed.turns
        ),
        text=packed.text,
        prefix=SharedPrefix(num_tokens=shared, parent=packed.parent),
        rewards=tuple(
            TokenReward(position=shared + reward.position, name=reward.name, value=reward.value)
            for reward in packed.rewards
        ),
    )
