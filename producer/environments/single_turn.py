"""Run episodes of one turn each: the prompt, then one completion, of a request for the whole group or of its own."""

import asyncio
from collections.abc import Sequence

import numpy as np

from coati_rl.routes import routes_of
from coati_rl.types import Completion, Prompt, SharedPrefix, Trajectory, Turn
from producer.environments.environment import Generate, Rollout


class SingleTurn:
    """Implement `Environment` with one request for G completions, so that an engine prefills the prompt once."""

    async def run(self, prompt: Prompt, generate: Generate, *, group_size: int) -> Rollout:
        completions = await generate(prompt.token_ids, num_samples=group_size)
        return Rollout(trajectories=single_turns(prompt, completions, temperature=generate.temperature))


class SampleBySample:
    """Implement `Environment` with a request for each sample, so that a sample that ends makes room for another.

    The samples are those of `SingleTurn`: each has the seed that it has in a request for the group.
    """

    async def run(self, prompt: Prompt, generate: Generate, *, group_size: int) -> Rollout:
        try:
            async with asyncio.TaskGroup() as tasks:  # a sample that fails ends the others
                asked = [tasks.create_task(generate(prompt.token_ids)) for _ in range(group_size)]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        completions = [completion for task in asked for completion in task.result()]
        return Rollout(trajectories=single_turns(prompt, completions, temperature=generate.temperature))


def single_turns(prompt: Prompt, completions: Sequence[Completion], *, temperature: float) -> tuple[Trajectory, ...]:
    """Return one trajectory for each completion, in order; `temperature` is that of sampling."""
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
        routes=routes_of(end, [completion.routes]),
    )
