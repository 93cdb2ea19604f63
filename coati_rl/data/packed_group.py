"""Pack a rollout group for the way to the coordinator, and for a checkpoint: without the prompt, which both know.

Of each trajectory the tokens after its shared prefix are kept, of all trajectories one after another (N tokens), and of
tokens in the loss (M of them) what was sampled. What hardly changes from token to token is kept as runs.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from coati_rl.run_lengths import Runs, decode_runs, encode_runs
from coati_rl.types import Prompt, RolloutGroup, Score, SharedPrefix, TokenReward, Trajectory, Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedGroup:
    """A rollout group without its prompt and temperature, which its lease has."""

    lease_id: int
    producer_id: int
    token_ids: np.ndarray  # int32[N]
    logprobs: np.ndarray  # float32[M], nats
    loss_mask: Runs  # of N
    policy_versions: Runs  # of M
    temperature: Runs  # of M
    trajectories: tuple[dict[str, Any], ...]  # all but the arrays, as JSON: see `_describe`
    scores: tuple[Score, ...]  # G

    @classmethod
    def pack(cls, group: RolloutGroup) -> "PackedGroup":
        """The inverse of `unpack`."""
        trajectories = group.trajectories
        return cls(
            lease_id=group.lease_id,
            producer_id=group.producer_id,
            token_ids=np.concatenate([each.token_ids[each.prefix.num_tokens :] for each in trajectories]),
            logprobs=np.concatenate([each.logprobs[each.loss_mask] for each in trajectories]),
            loss_mask=encode_runs(np.concatenate([each.loss_mask[each.prefix.num_tokens :] for each in trajectories])),
            policy_versions=encode_runs(group.policy_versions),
            temperature=encode_runs(np.concatenate([each.temperature[each.loss_mask] for each in trajectories])),
            trajectories=tuple(_describe(each, group) for each in trajectories),
            scores=group.scores,
        )

    def unpack(self, prompt: Prompt, *, temperature: float) -> RolloutGroup:
        """The group of a lease's prompt, sampled at the lease's temperature.

        Raises: ValueError if arrays and description do not belong together.
        """
        mask = decode_runs(self.loss_mask, bool)
        if len(mask) != len(self.token_ids) or len(mask) != sum(each["num_tokens"] for each in self.trajectories):
            raise ValueError("arrays and trajectories differ in length")
        logprobs = _spread(self.logprobs, mask, 0.0)
        versions = _spread(decode_runs(self.policy_versions, np.int32), mask, -1)
        temperatures = _spread(decode_runs(self.temperature, np.float32), mask, 1.0)
        prompt_ids = np.array(prompt.token_ids, dtype=np.int32)
        trajectories: list[Trajectory] = []
        start = 0
        for described in self.trajectories:
            own, parent = slice(start, start + described["num_tokens"]), described["parent"]
            start = own.stop
            shared_ids = (prompt_ids if parent is None else trajectories[parent].token_ids)[: described["num_shared"]]
            shared = len(shared_ids)
            turns = described["turns"]
            trajectories.append(
                Trajectory(
                    token_ids=np.concatenate([shared_ids, self.token_ids[own]]),
                    loss_mask=_after(shared, mask[own], False),
                    logprobs=_after(shared, logprobs[own], 0.0),
                    policy_versions=_after(shared, versions[own], -1),
                    temperature=_after(shared, temperatures[own], 1.0),
                    episode=described["episode"],
                    turns=tuple(
                        Turn(index=i, start=shared + s, end=shared + e, finish_reason=f) for i, s, e, f in turns
                    ),
                    text=described["text"],
                    prefix=SharedPrefix(num_tokens=shared, parent=parent),
                    rewards=tuple(
                        TokenReward(position=shared + place, name=name, value=value)
                        for place, name, value in described["rewards"]
                    ),
                )
            )
        return RolloutGroup(
            lease_id=self.lease_id,
            producer_id=self.producer_id,
            prompt=prompt,
            temperature=temperature,
            trajectories=tuple(trajectories),
            scores=self.scores,
        )


def _describe(trajectory: Trajectory, group: RolloutGroup) -> dict[str, Any]:
    """All but the arrays; places are counted from the end of the shared prefix."""
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


def _spread(values: np.ndarray, mask: np.ndarray, fill: float) -> np.ndarray:
    """Values of the tokens in the loss -> of all tokens, `fill` elsewhere. Raises: ValueError if their number differs."""
    if len(values) != np.count_nonzero(mask):
        raise ValueError(f"{len(values)} values for {np.count_nonzero(mask)} tokens in the loss")
    spread = np.full(len(mask), fill, dtype=values.dtype)
    spread[mask] = values
    return spread


def _after(num_shared: int, own: np.ndarray, fill: float) -> np.ndarray:
    """`fill` on the shared prefix, then a trajectory's own values."""
    values = np.full(num_shared + len(own), fill, dtype=own.dtype)
    values[num_shared:] = own
    return values
