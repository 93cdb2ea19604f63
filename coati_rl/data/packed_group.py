"""Pack a rollout group for the way to the coordinator, and for a checkpoint: without the prompt, which both know.

Of each trajectory the tokens after its shared prefix are kept, of all trajectories one after another (N tokens), and of
tokens in the loss (M of them) what was sampled. What hardly changes from token to token is kept as runs.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from coati_rl.run_lengths import Runs, decode_runs, encode_runs
from coati_rl.types import Prompt, RolloutGroup, Score, SharedPrefix, TokenReward, Trajectory, Turn

_FILL = {"loss_mask": False, "logprobs": 0.0, "policy_versions": -1, "temperature": 1.0}  # where nothing is sampled


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
        own = [slice(each.prefix.num_tokens, None) for each in group.trajectories]
        pairs = [*zip(group.trajectories, own, strict=True)]
        mask = np.concatenate([each.loss_mask[part] for each, part in pairs])
        return cls(
            lease_id=group.lease_id,
            producer_id=group.producer_id,
            token_ids=np.concatenate([each.token_ids[part] for each, part in pairs]),
            logprobs=np.concatenate([each.logprobs[part] for each, part in pairs])[mask],
            loss_mask=encode_runs(mask),
            policy_versions=encode_runs(np.concatenate([each.policy_versions[part] for each, part in pairs])[mask]),
            temperature=encode_runs(np.concatenate([each.temperature[part] for each, part in pairs])[mask]),
            trajectories=tuple(_describe(each, group) for each in group.trajectories),
            scores=group.scores,
        )

    def unpack(self, prompt: Prompt, *, temperature: float) -> RolloutGroup:
        """The group of a lease's prompt, sampled at the lease's temperature.

        Raises: ValueError if arrays and description do not belong together.
        """
        mask = decode_runs(self.loss_mask, bool)
        if len(mask) != len(self.token_ids) or len(mask) != sum(each["num_tokens"] for each in self.trajectories):
            raise ValueError("arrays and trajectories differ in length")
        own = {
            "loss_mask": mask,
            "logprobs": _spread(self.logprobs, mask, _FILL["logprobs"]),
            "policy_versions": _spread(decode_runs(self.policy_versions, np.int32), mask, _FILL["policy_versions"]),
            "temperature": _spread(decode_runs(self.temperature, np.float32), mask, _FILL["temperature"]),
        }
        prompt_ids = np.array(prompt.token_ids, dtype=np.int32)
        trajectories: list[Trajectory] = []
        start = 0
        for described in self.trajectories:
            end, parent = start + described["num_tokens"], described["parent"]
            shared_ids = (prompt_ids if parent is None else trajectories[parent].token_ids)[: described["num_shared"]]
            token_ids = np.concatenate([shared_ids, self.token_ids[start:end]])
            arrays = {name: _after(len(shared_ids), values[start:end], _FILL[name]) for name, values in own.items()}
            trajectories.append(_restore(described, token_ids, len(shared_ids), arrays))
            start = end
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


def _restore(
    described: dict[str, Any], token_ids: np.ndarray, shared: int, arrays: dict[str, np.ndarray]
) -> Trajectory:
    """The inverse of `_describe`; `shared`: tokens of the prefix."""
    return Trajectory(
        token_ids=token_ids,
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


def _spread(values: np.ndarray, mask: np.ndarray, fill: float) -> np.ndarray:
    """Spread values of the tokens in the loss over all tokens; `fill` elsewhere.

    Raises: ValueError if there are not as many.
    """
    if len(values) != np.count_nonzero(mask):
        raise ValueError(f"{len(values)} values for {np.count_nonzero(mask)} tokens in the loss")
    if len(values) == len(mask):
        return values
    spread = np.full(len(mask), fill, dtype=values.dtype)
    spread[mask] = values
    return spread


def _after(num_shared: int, own: np.ndarray, fill: float) -> np.ndarray:
    """Put `fill` on the shared prefix before a trajectory's own values."""
    values = np.empty(num_shared + len(own), dtype=own.dtype)
    values[:num_shared] = fill
    values[num_shared:] = own
    return values
