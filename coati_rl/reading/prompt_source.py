"""Draw the prompts of a dataset by number, in an order that only the seed decides.

Without shares each prompt is drawn once per episode: of N prompts in the dataset, number i of a run belongs to episode
i // N. Prompts of several sources with shares are drawn as `mixing` says; an episode has N draws then, too.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from itertools import groupby
from typing import Protocol

from coati_rl.reading.draw_order import DrawOrder, digest_of
from coati_rl.reading.mixing import MixedOrder
from coati_rl.reading.streamed_prompts import StreamedPrompts
from coati_rl.types import Prompt


class PromptSource(Protocol):
    """Draw the prompts of a run by number, so that a run is resumed by number: a dataset, or an endless generator."""

    @property
    def order(self) -> DrawOrder:
        """Return the draw order; a checkpoint fits a source of the same order."""

    @property
    def length(self) -> int | None:
        """Return the number of prompts; None if the source is endless."""

    def draw(self, number: int) -> Prompt:
        """Return prompt `number` of the run, from 0, with a unique uid; a number always gives the same prompt.

        Numbers past `length` occur when a run is resumed with fewer episodes.
        """

    def find(self, uid: str) -> Prompt:
        """Return the prompt that was drawn with a uid. Raises: KeyError."""

    def first(self, num_prompts: int) -> Sequence[Prompt]:
        """Return some of the first prompts, at most so many."""


class DatasetPrompts:
    """Implement `PromptSource`; a uid is `<prompt uid>.<pass>`, so that each pass samples a prompt anew."""

    def __init__(
        self, prompts: Sequence[Prompt], *, num_episodes: int, seed: int, shares: Sequence[Fraction] = ()
    ) -> None:
        """Take the prompts, source by source; `shares` of the draws that each source has, none without mixing."""
        self._prompts = prompts
        self._num_episodes = num_episodes
        self._seed = seed
        self._shares = shares
        self._mixed = MixedOrder(source_sizes(prompts), shares, seed=seed) if shares else None
        self._episode = -1  # of `_shuffled`
        self._shuffled: list[int] = []

    @cached_property
    def order(self) -> DrawOrder:
        """Return the draw order."""
        prompts = self._prompts
        known = prompts if isinstance(prompts, StreamedPrompts) else digest_of(prompts, self._shares)
        return DrawOrder(
            seed=self._seed,
            num_prompts=len(prompts),
            fingerprint=known.fingerprint,
            ground_truths=known.ground_truths,
        )

    @property
    def length(self) -> int:
        """Return the number of prompts of all episodes."""
        return len(self._prompts) * self._num_episodes

    def draw(self, number: int) -> Prompt:
        if self._mixed is not None:
            index, passed = self._mixed.draw(number)
            return replace(self._prompts[index], uid=f"{self._prompts[index].uid}.{passed}")
        episode, place = divmod(number, len(self._prompts))
        if episode != self._episode:
            self._episode, self._shuffled = episode, list(range(len(self._prompts)))
            random.Random(f"{self._seed}/{episode}").shuffle(self._shuffled)
        prompt = self._prompts[self._shuffled[place]]
        return replace(prompt, uid=f"{prompt.uid}.{episode}")

    def find(self, uid: str) -> Prompt:
        if isinstance(self._prompts, StreamedPrompts):
            return replace(self._prompts.find(uid.rpartition(".")[0]), uid=uid)
        return drawn_prompt(self._by_uid, uid)

    def first(self, num_prompts: int) -> Sequence[Prompt]:
        return self._prompts[:num_prompts]

    @cached_property
    def _by_uid(self) -> dict[str, Prompt]:
        return {prompt.uid: prompt for prompt in self._prompts}


def source_sizes(prompts: Sequence[Prompt]) -> list[int]:
    """Return the number of prompts of each source: of those that stand together with a name, uids `<name>-<row>`."""
    if isinstance(prompts, StreamedPrompts):
        return [*prompts.sizes]
    return [len([*group]) for _, group in groupby(prompts, key=lambda prompt: prompt.uid.rpartition("-")[0])]


def drawn_prompt(prompts: Mapping[str, Prompt], uid: str) -> Prompt:
    """Return the prompt that was drawn with a uid; `prompts` are the dataset's by uid. Raises: KeyError."""
    row, _, _ = uid.rpartition(".")
    return replace(prompts[row], uid=uid)


def probe_tokens(prompts: Sequence[Prompt], max_tokens: int) -> tuple[int, ...]:
    """Return token ids for a comparison of models: those of the first prompts, concatenated."""
    token_ids: list[int] = []
    for prompt in prompts:
        token_ids += prompt.token_ids
        if len(token_ids) >= max_tokens:
            break
    return tuple(token_ids[:max_tokens])
