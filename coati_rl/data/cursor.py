"""Draw the next prompt: every prompt once per episode, in an order that only the seed decides."""

import random
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from coati_rl.data.position import DrawOrder, fingerprint, ground_truth_digest
from coati_rl.types import Prompt


class PromptCursor:
    """Draws prompts; a uid is `<prompt uid>.<episode>`, so that a prompt met again is sampled afresh."""

    def __init__(self, prompts: Sequence[Prompt], *, num_episodes: int, seed: int) -> None:
        self._prompts = prompts
        self._num_episodes = num_episodes
        self._seed = seed
        self._shuffled: list[int] = []  # the order of the present episode
        self._waiting: deque[Prompt] = deque()  # of a run that is resumed: drawn then, not trained
        self.num_drawn = 0  # from the dataset

    @cached_property
    def order(self) -> DrawOrder:
        """Return what decides the draws."""
        return DrawOrder(
            seed=self._seed,
            num_prompts=len(self._prompts),
            fingerprint=fingerprint(self._prompts),
            ground_truths=ground_truth_digest(self._prompts),
        )

    def probe(self, max_tokens: int) -> tuple[int, ...]:
        """Token ids for a comparison of models: the first prompts', one after another."""
        token_ids: list[int] = []
        for prompt in self._prompts:
            token_ids += prompt.token_ids
            if len(token_ids) >= max_tokens:
                break
        return tuple(token_ids[:max_tokens])

    @property
    def num_due(self) -> int:
        """Prompts of all episodes."""
        return len(self._prompts) * self._num_episodes

    @property
    def has_more(self) -> bool:
        """True while `draw` has a prompt."""
        return bool(self._waiting) or self.num_drawn < self.num_due

    @property
    def waiting(self) -> tuple[Prompt, ...]:
        """Prompts that were drawn before the run was resumed, and wait to be drawn again."""
        return tuple(self._waiting)

    def resume(self, num_drawn: int, waiting: Collection[str]) -> None:
        """Go on after `num_drawn` draws, but first draw those of them again whose uid is in `waiting`."""
        again, draws = set(waiting), (self._draw_next() for _ in range(num_drawn))
        self._waiting.extend(prompt for prompt in draws if prompt.uid in again)

    def draw(self) -> Prompt | None:
        """The next prompt, None after the last episode."""
        if not self.has_more:
            return None
        return self._waiting.popleft() if self._waiting else self._draw_next()

    def _draw_next(self) -> Prompt:
        episode, place = divmod(self.num_drawn, len(self._prompts))
        if place == 0:
            self._shuffled = list(range(len(self._prompts)))
            random.Random(f"{self._seed}/{episode}").shuffle(self._shuffled)
        self.num_drawn += 1
        prompt = self._prompts[self._shuffled[place]]
        return replace(prompt, uid=f"{prompt.uid}.{episode}")


def drawn_prompt(prompts: Mapping[str, Prompt], uid: str) -> Prompt:
    """The prompt that was drawn under a uid, from the dataset's by their own. Raises: KeyError if there is none."""
    row, _, _ = uid.rpartition(".")
    return replace(prompts[row], uid=uid)
