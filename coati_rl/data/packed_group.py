"""Pack a rollout group for the coordinator and for a checkpoint, without the prompt, which both know.

It holds the tokens after the shared prefix of all trajectories, concatenated (N tokens), and the arrays of the M tokens
in the loss. Arrays that are constant over many tokens are run-length encoded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np

from coati_rl.frozen import unchecked
from coati_rl.run_lengths import Runs, decode_runs, encode_runs, slices
from coati_rl.types import Prompt, RolloutGroup, Score, SharedPrefix, TokenReward, Trajectory, Turn

_PACKED, _ARRAYS = "packed", "arrays"  # in the cache of a group
_SCORE_FIELDS = tuple(field.name for field in fields(Score))


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
    trajectories: tuple[dict[str, Any], ...]  # all but the arrays, as JSON: see `_describe`
    scores: tuple[dict[str, Any], ...]  # G, by the names of `Score`, as JSON
    records: tuple[dict[str, Any], ...] = ()  # G or none, as of `RolloutGroup`

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
            trajectories=tuple(_describe(each, group) for each in trajectories),
            scores=tuple({name: getattr(score, name) for name in _SCORE_FIELDS} for score in group.scores),
            records=group.records,
        )

    def unpack(self, prompt: Prompt, *, temperature: float) -> RolloutGroup:
        """Restore the group from its lease's prompt and temperature.

        The trajectories of a group of single answers are restored when one of them is first read, as its record does.
        Samples and statistics need only `GroupArrays`.

        Raises: ValueError if arrays and description do not match.
        """
        num_tokens = sum(described["num_tokens"] for described in self.trajectories)
        num_loss = sum(length for is_in_loss, length in self.loss_mask if is_in_loss)
        runs = (self.loss_mask, self.policy_versions, self.temperature)
        mask, versions, temperatures = (sum(length for _, length in each) for each in runs)
        lengths = len(self.token_ids), mask, len(self.logprobs), versions, temperatures
        if lengths != (num_tokens, num_tokens, num_loss, num_loss, num_loss):
            raise ValueError(f"{num_tokens} tokens, {num_loss} in the loss, and arrays of {lengths}")
        fields: dict[str, Any] = {
            "lease_id": self.lease_id,
            "producer_id": self.producer_id,
            "prompt": prompt,
            "temperature": temperature,
            "scores": tuple(Score(**score) for score in self.scores),
            "records": tuple(self.records),
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
            and [described["episode"] for described in self.trajectories] == [*range(len(self.scores))]
            and all(
                described["parent"] is None
                and described["num_shared"] is None
                and len(described["turns"]) == 1
                and described["turns"][0][1] == 0 <= described["turns"][0][2] == described["num_tokens"]
                for described in self.trajectories
            )
        )

    def _restore(self, prompt: Prompt) -> tuple[Trajectory, ...]:
        arrays = GroupArrays.of(self)
        prompt_ids = np.array(prompt.token_ids, dtype=np.int32)
        trajectories: list[Trajectory] = []
        for described, own, counted in zip(self.trajectories, arrays.own, arrays.counted, strict=True):
            parent = described["parent"]
            shared_ids = (prompt_ids if parent is None else trajectories[parent].token_ids)[: described["num_shared"]]
            parts = {
                "token_ids": np.concatenate([shared_ids, arrays.token_ids[own]]),
                "loss_mask": np.concatenate([np.zeros(len(shared_ids), dtype=bool), arrays.loss_mask[own]]),
                "logprobs": arrays.logprobs[counted],
                "policy_versions": arrays.policy_versions[counted],
                "temperature": arrays.temperature[counted],
            }
            trajectories.append(_trajectory(described, len(shared_ids), parts))
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
        own = slices(described["num_tokens"] for described in packed.trajectories)
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


def _describe(trajectory: Trajectory, group: RolloutGroup) -> dict[str, Any]:
    """Return all but the arrays; positions are counted from the end of the shared prefix."""
    shared, parent = trajectory.prefix.num_tokens, trajectory.prefix.parent
    num_there = len(group.prompt.token_ids) if parent is None else len(group.trajectories[parent].token_ids)
    return {
        "episode": trajectory.episode,
        "parent": parent,
        "num_shared": None if shared == num_there else shared,  # None: all of the parent's
        "num_tokens": len(trajectory.token_ids) - shared,
        "turns": [
            [turn.index, turn.start - shared, turn.end - shared, turn.finish_reason] for turn in trajectory.turns
        ],
        "rewards": [[reward.position - shared, reward.name, reward.value] for reward in trajectory.rewards],
        "text": trajectory.text,
    }


def _trajectory(described: dict[str, Any], shared: int, arrays: dict[str, np.ndarray]) -> Trajectory:
    """Restore what `_describe` returned; `shared` is the number of tokens of the prefix."""
    return Trajectory(
        **arrays,
        episode=described["episode"],
        turns=tuple(
            Turn(index=index, start=shared + start, end=shared + end, finish_reason=reason)
            for index, start, end, reason in described["turns"]
        ),
        text=described["text"],
        prefix=SharedPrefix(num_tokens=shared, parent=described["parent"]),
        rewards=tuple(
            TokenReward(position=shared + place, name=name, value=value) for place, name, value in described["rewards"]
        ),
    )
