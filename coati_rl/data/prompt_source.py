"""Draw the prompts of a dataset by number: each once per episode, in an order that only the seed decides.

N prompts in the dataset; prompt number i of a run belongs to episode i // N.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol

from coati_rl.data.draw_order import DrawOrder, fingerprint, ground_truth_digest
from coati_rl.types import Prompt


class PromptSource(Protocol):
    """Draw the prompts of a run by number, so that a run is resumed by number: a dataset, or an endless generator."""

    @property
    def order(self) -> DrawOrder:
        """Return what decides the draws; a checkpoint fits a source of the same order."""

    @property
    def length(self) -> int | None:
        """Return how many prompts there are in all; None: the source is endless."""

    def draw(self, number: int) -> Prompt:
        """Return prompt `number` of the run, from 0, under a uid of its own: the same one whenever it is asked for.

        Numbers past `length` are asked for when a run with fewer episodes goes on from one that had drawn them.
        """


class DatasetPrompts:
    """Implement PromptSource; a uid is `<prompt uid>.<episode>`, so that a prompt met again is sampled afresh."""

    def __init__(self, prompts: Sequence[Prompt], *, num_episodes: int, seed: int) -> None:
        self._prompts = prompts
        self._num_episodes = num_episodes
        self._seed = seed
        self._episode = -1  # whose order is at hand
        self._shuffled: list[int] = []

    @cached_property
    def order(self) -> DrawOrder:
        """Return what decides the draws."""
        return DrawOrder(
            seed=self._seed,
            num_prompts=len(self._prompts),
            fingerprint=fingerprint(self._prompts),
            ground_truths=ground_truth_digest(self._prompts),
        )

    @property
    def length(self) -> int:
        """Prompts of all episodes."""
        return len(self._prompts) * self._num_episodes

    def draw(self, number: int) -> Prompt:
        """See PromptSource."""
        episode, place = divmod(number, len(self._prompts))
        if episode != self._episode:
            self._episode, self._shuffled = episode, list(range(len(self._prompts)))
            random.Random(f"{self._seed}/{episode}").shuffle(self._shuffled)
        prompt = self._prompts[self._shuffled[place]]
        return replace(prompt, uid=f"{prompt.uid}.{episode}")


def drawn_prompt(prompts: Mapping[str, Prompt], uid: str) -> Prompt:
    """Return the prompt that was drawn under a uid, from the dataset's by their own. Raises: KeyError without one."""
    row, _, _ = uid.rpartition(".")
    return replace(prompts[row], uid=uid)


def probe_tokens(prompts: Sequence[Prompt], max_tokens: int) -> tuple[int, ...]:
    """Return token ids for a comparison of models: the first prompts', one after another."""
    token_ids: list[int] = []
    for prompt in prompts:
        token_ids += prompt.token_ids
        if len(token_ids) >= max_tokens:
            break
    return tuple(token_ids[:max_tokens])
