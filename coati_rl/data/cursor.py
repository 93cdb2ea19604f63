"""Which prompt comes next: every prompt once per episode, in an order that only the seed decides."""

import random
from collections.abc import Sequence
from dataclasses import replace

from coati_rl.types import Prompt


class PromptCursor:
    """Draws prompts; a uid is `<prompt uid>.<episode>`, so that a prompt met again is sampled afresh."""

    def __init__(self, prompts: Sequence[Prompt], *, num_episodes: int, seed: int) -> None:
        self._prompts = prompts
        self._num_episodes = num_episodes
        self._seed = seed
        self._order: list[int] = []
        self.num_drawn = 0

    @property
    def num_due(self) -> int:
        """Prompts of all episodes."""
        return len(self._prompts) * self._num_episodes

    @property
    def has_more(self) -> bool:
        """True while `draw` has a prompt."""
        return self.num_drawn < self.num_due

    def draw(self) -> Prompt | None:
        """The next prompt, None after the last episode."""
        if not self.has_more:
            return None
        episode, place = divmod(self.num_drawn, len(self._prompts))
        if place == 0:
            self._order = list(range(len(self._prompts)))
            random.Random(f"{self._seed}/{episode}").shuffle(self._order)
        self.num_drawn += 1
        prompt = self._prompts[self._order[place]]
        return replace(prompt, uid=f"{prompt.uid}.{episode}")
