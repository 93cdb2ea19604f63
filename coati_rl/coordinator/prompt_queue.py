"""Queue the prompts of a run: first those drawn before it was resumed and not trained, then those of the source."""

from collections import deque
from collections.abc import Collection
from typing import ClassVar

from coati_rl.reading.draw_order import DrawOrder
from coati_rl.reading.prompt_source import PromptSource
from coati_rl.types import Prompt


class PromptQueue:
    """Draw prompts of a source in order. Not thread-safe."""

    KEPT: ClassVar = ("_waiting", "num_drawn")

    def __init__(self, source: PromptSource) -> None:
        self._source = source
        self._waiting: deque[Prompt] = deque()  # of a resumed run: drawn before, not trained
        self.num_drawn = 0  # from the source

    @property
    def order(self) -> DrawOrder:
        """Return the draw order."""
        return self._source.order

    @property
    def length(self) -> int | None:
        """Return the number of prompts of the source; None if it is endless."""
        return self._source.length

    @property
    def has_more(self) -> bool:
        """Return True while `draw` has a prompt."""
        return bool(self._waiting) or self._source.length is None or self.num_drawn < self._source.length

    @property
    def waiting(self) -> tuple[Prompt, ...]:
        """Return the prompts drawn before the run was resumed that wait to be drawn again."""
        return tuple(self._waiting)

    def resume(self, num_drawn: int, waiting: Collection[str]) -> None:
        """Continue after `num_drawn` draws, but first draw again those whose uid is in `waiting`."""
        again, number = set(waiting), num_drawn
        while again and number:  # from the end: what waits was drawn last, and a draw may cost time
            number -= 1
            prompt = self._source.draw(number)
            if prompt.uid in again:
                again.remove(prompt.uid)
                self._waiting.appendleft(prompt)
        self.num_drawn = num_drawn

    def draw(self) -> Prompt | None:
        """Return the next prompt; None after the last one."""
        if not self.has_more:
            return None
        if self._waiting:
            return self._waiting.popleft()
        prompt = self._source.draw(self.num_drawn)  # counted when it is there: a row may not be readable any more
        self.num_drawn += 1
        return prompt
