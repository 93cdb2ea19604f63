"""Pack a rollout group for the coordinator and for a checkpoint, without the prompt, which both know.

It holds the tokens after the shared prefix of all trajectories, concatenated (N tokens), and the arrays of the M tokens
in the loss. Arrays that are constant over many tokens are run-length encoded.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from coati_rl.run_lengths import Runs, decode_runs, encode_runs
from coati_rl.types import Prompt, RolloutGroup, Score, SharedPrefix, TokenReward, Trajectory, Turn

_SCORE_FIELDS = tuple(field.name for field in fields(Score))


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedGroup:
    """Hold a rollout group without its prompt and temperature, which its lease has."""

    lease_id: int
    producer_id: int
    token_ids: np.ndarray  # int32[N]
    logprobs: np.ndarray  # float32[M], nats
    loss_mask: Runs  # of N
    policy_versions: Runs  # of M
    temperature: Runs  # of M
    trajectories: tuple[dict[str, Any], ...]  # all but the arrays, as JSON: see `_describe`
    scores: tuple[dict[str, Any], ...]  # G, by the names of `Score`, as JSON

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
        )

    def unpack(self, prompt: Prompt, *, temperature: float) -> RolloutGroup:
        """Restore the group of a lease's prompt, sampled at the lease's temperature.

        Raises: ValueError if arrays and description do not match.
        """
        mask = decode_runs(self.loss_mask, bool)
        versions = decode_runs(self.policy_versions, np.int32)
        temperatures = decode_runs(self.temperature, np.float32)
        prompt_ids = np.array(prompt.token_ids, dtype=np.int32)
        trajectories: list[Trajectory] = []
        start = loss_start = 0  # of a trajectory, among all tokens and among those in the loss
        for described in self.trajectories:
            end, parent = start + described["num_tokens"], described["parent"]
            loss_end = loss_start + int(np.count_nonzero(mask[start:end]))
            shared_ids = (prompt_ids if parent is None else trajectories[parent].token_ids)[: described["num_shared"]]
            arrays = {
                "token_ids": np.concatenate([shared_ids, self.token_ids[start:end]]),
                "loss_mask": np.concatenate([np.zeros(len(shared_ids), dtype=bool), mask[start:end]]),
                "logprobs": self.logprobs[loss_start:loss_end],
                "policy_versions": versions[loss_start:loss_end],
                "temperature": temperatures[loss_start:loss_end],
            }
            trajectories.append(_restore(described, len(shared_ids), arrays))
            start, loss_start = end, loss_end
        lengths = len(self.token_ids), len(mask), len(self.logprobs), len(versions), len(temperatures)
        if lengths != (start, start, loss_start, loss_start, loss_start):
            raise ValueError(f"{start} tokens, {loss_start} in the loss, and arrays of {lengths}")
        return RolloutGroup(
            lease_id=self.lease_id,
            producer_id=self.producer_id,
            prompt=prompt,
            temperature=temperature,
            trajectories=tuple(trajectories),
            scores=tuple(Score(**score) for score in self.scores),
        )


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


def _restore(described: dict[str, Any], shared: int, arrays: dict[str, np.ndarray]) -> Trajectory:
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
