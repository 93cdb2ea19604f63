"""Define what an environment is: it turns a prompt into the trajectories of its group, with an engine to ask.

A group is G episodes of one prompt. An environment may ask once for the whole group, as a single turn does, or run
episodes of several turns at the same time, which wait for tools between their turns.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from coati_rl.protocols import OnTokens
from coati_rl.types import Completion, Prompt, SamplingParams, Score, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """Hold the G episodes of a prompt as an environment leaves them."""

    trajectories: Sequence[Trajectory]  # of all episodes, by episode; a parent comes before its forks
    scores: Mapping[int, Score] = field(default_factory=dict)  # by episode: those that no scorer is asked for
    records: Mapping[int, dict[str, Any]] = field(default_factory=dict)  # by episode: its turns, as JSON, for rollouts


class Generate(Protocol):
    """Ask the engine for samples with the sampling of the prompt's lease and weights no older than its own."""

    @property
    def temperature(self) -> float:
        """Return the sampling temperature of the lease; 0 is greedy."""

    @property
    def sampling(self) -> SamplingParams:
        """Return the sampling of the lease."""

    @property
    def cut(self) -> asyncio.Event:
        """Return the event that trainers wait for the group, and --stale-episodes has its open episodes end now."""

    async def __call__(
        self,
        token_ids: Sequence[int],
        *,
        num_samples: int = 1,
        episode: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> tuple[Completion, ...]:
        """Sample continuations of some tokens.

        Args:
            token_ids: what the policy is given, at least one.
            num_samples: completions that are wanted.
            episode: from 0, whose next turn this is: until the environment returns, weights then change in the middle
                of it only where a run allows that, also while it waits for something else. None: an episode a sample.
            sampling: what differs from the lease's sampling in this request: temperature, top_p, top_k, min_p,
                max_new_tokens, stop, seed. The trajectory has to hold the temperature that was used.
            on_tokens: see `GenerationEngine.submit`.
        Returns: `num_samples` completions, in order; the same ones whenever the same requests are made in an episode.
        Raises: RolloutError if the engine refuses, or `sampling` has a field or a value that there is not; EngineError
            if it has ended.
        """

    def end_episode(self, episode: int) -> None:
        """Tell, from any thread, that an episode asks no more, while others of the group go on.

        Weights may then change without waiting for it. An episode of the group that has not asked yet waits until they
        have, and so would they for the others.
        """


class Environment(Protocol):
    """Run the episodes of a prompt; one object serves all prompts of a producer, many at a time."""

    async def run(self, prompt: Prompt, generate: Generate, *, group_size: int) -> Rollout:
        """Roll out a group.

        An episode is sampled as `generate` decides, which has the last one of a group with a baseline greedy.
        It is cancelled when nobody waits for the group any more. What it raises fails the prompt, which is recorded and
        counted; an EngineError ends the producer. An episode that fails alone has a score that is invalid.

        Returns: trajectories of `group_size` episodes, and the scores of those that need no scorer.
        """
