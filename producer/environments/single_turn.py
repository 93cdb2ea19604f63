"""Make the trajectories of episodes that have one turn each: the prompt, then one completion of a request for all."""

from collections.abc import Sequence

import numpy as np

from coati_rl.types import Completion, Prompt, SharedPrefix, Trajectory, Turn


def single_turns(prompt: Prompt, completions: Sequence[Completion], *, temperature: float) -> tuple[Trajectory, ...]:
    """One trajectory for each completion, in order; `temperature`: that all of them were sampled at."""
    prompt_ids = np.array(prompt.token_ids, dtype=np.int32)
    return tuple(
        _single_turn(prompt_ids, completion, temperature=temperature, episode=episode)
        for episode, completion in enumerate(completions)
    )


def _single_turn(prompt_ids: np.ndarray, completion: Completion, *, temperature: float, episode: int) -> Trajectory:
    num_tokens = len(completion.token_ids)
    start, end = len(prompt_ids), len(prompt_ids) + num_tokens
    return Trajectory(
        token_ids=np.concatenate([prompt_ids, completion.token_ids]),
        loss_mask=np.arange(end) >= start,
        logprobs=completion.logprobs,
        policy_versions=completion.policy_versions,
        temperature=np.full(num_tokens, temperature, dtype=np.float32),
        episode=episode,
        turns=(Turn(index=0, start=start, end=end, finish_reason=completion.finish_reason),),
        text=completion.text,
        prefix=SharedPrefix(num_tokens=start),
    )
