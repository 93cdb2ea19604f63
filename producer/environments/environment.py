"""Define what an environment is: it turns a prompt into the trajectories of its group, with an engine to ask.

A group is G episodes of one prompt. An environment may ask once for the whole group, as a single turn does, or run
episodes of several turns at the same time, which wait for tools between their turns.
"""

from collections.abc import Sequence
from typing import Protocol

from coati_rl.types import Completion, Prompt, Trajectory


class Generate(Protocol):
    """Ask the engine for samples with the sampling of the prompt's lease and weights no older than its own."""

    @property
    def temperature(self) -> float:
        """Return the sampling temperature; 0 is greedy."""

    async def __call__(
        self, token_ids: Sequence[int], *, num_samples: int = 1, episode: int | None = None
    ) -> tuple[Completion, ...]:
        """Sample continuations of some tokens.

        Args:
            token_ids: what the policy is given, at least one.
            num_samples: completions that are wanted.
            episode: from 0, whose next turn this is: until the environment returns, weights then change in the middle
                of it only where a run allows that, also while it waits for something else. None: an episode a sample.
        Returns: `num_samples` completions, in order; the same ones whenever the same requests are made in an episode.
        Raises: RolloutError if the engine refuses; EngineError if it has ended.
        """


class Environment(Protocol):
    """Run the episodes of a prompt; one object serves all prompts of a producer, many at a time."""

    async def run(self, prompt: Prompt, generate: Generate, *, group_size: int) -> Sequence[Trajectory]:
        """Roll out a group.

        It is cancelled when nobody waits for the group any more. What it raises fails the prompt, which is recorded and
        counted; an EngineError ends the producer.

        Returns: trajectories of `group_size` episodes, by episode; a parent comes before its forks.
        """
