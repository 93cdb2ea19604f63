"""Build trajectories of several turns, and of a forked episode."""

from dataclasses import replace

import numpy as np

from coati_rl.types import SharedPrefix, TokenReward, Trajectory, Turn


def trajectory(token_ids, *turns, episode=0, shared=3, parent=None, index=0, version=7, rewards=()):
    """Of an episode with several turns, each (first token, end[, finish reason]); all their tokens are in the loss.

    The temperature is 0.7, the logprob of the token at place i -i / 8. `index`: of the first turn in the episode.
    """
    mask = np.zeros(len(token_ids), dtype=bool)
    for start, end, *_ in turns:
        mask[start:end] = True
    return Trajectory(
        token_ids=np.array(token_ids, dtype=np.int32),
        loss_mask=mask,
        logprobs=-np.flatnonzero(mask).astype(np.float32) / 8,
        policy_versions=np.full(mask.sum(), version, dtype=np.int32),
        temperature=np.full(mask.sum(), 0.7, dtype=np.float32),
        episode=episode,
        turns=tuple(
            Turn(index=index + i, start=start, end=end, finish_reason=reason[0] if reason else "stop")
            for i, (start, end, *reason) in enumerate(turns)
        ),
        text=f"turn {index + len(turns) - 1} of episode {episode}",
        prefix=SharedPrefix(num_tokens=shared, parent=parent),
        rewards=rewards,
    )


TOOL_REWARD = TokenReward(position=4, name="tool", value=0.5)
# Episode 0 has two turns with a tool's answer (20, 21) between them, and a fork after the first turn, whose context
# (22) leads to a third; 2 + 3 + 1 tokens are in the loss. Episode 1 has one turn of two tokens.
FORKED = (
    trajectory([1, 2, 3, 10, 11, 20, 21, 12, 13, 14], (3, 5), (7, 10), rewards=(TOOL_REWARD,)),
    trajectory([1, 2, 3, 10, 11, 22, 15], (6, 7, "length"), shared=5, parent=0, index=2, version=8),
    trajectory([1, 2, 3, 16, 17], (3, 5), episode=1),
)


def masked(whole, mask):
    """A trajectory with fewer tokens in the loss."""
    kept = np.array(mask)[whole.loss_mask]
    names = ("logprobs", "policy_versions", "temperature")
    return replace(whole, loss_mask=np.array(mask), **{name: getattr(whole, name)[kept] for name in names})
