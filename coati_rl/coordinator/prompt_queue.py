"""Queue the prompts of a run: first those that were drawn before it was resumed and not trained, then the source's."""

from collections import deque
from collections.abc import Collection

from coati_rl.data.draw_order import DrawOrder
from coati_rl.data.prompt_source import PromptSource
from coati_rl.types import Prompt


class PromptQueue:
    """Remember which number of a source comes next. Not thread-safe: its owner has a lock."""

    def __init__(self, source: PromptSource) -> None:
        self._source = source
        self._waiting: deque[Prompt] = deque()  # of a run that is resumed: drawn then, not trained
        self.num_drawn = 0  # from the source

    @property
    def order(self) -> DrawOrder:
        """Return what decides the draws."""
        return self._source.order

    @property
    def length(self) -> int | None:
        """Return how many prompts the source has in all; None: it is endless."""
        return self._source.length

    @property
    def has_more(self) -> bool:
        """True while `draw` has a prompt."""
        return bool(self._waiting) or self._source.length is None or self.num_drawn < self._source.length

    @property
    def waiting(self) -> tuple[Prompt, ...]:
        """Return the prompts that were drawn before the run was resumed, and wait to be drawn again."""
        return tuple(self._waiting)

    def resume(self, num_drawn: int, waiting: Collection[str]) -> None:
        """Go on after `num_drawn` draws, but first draw those of them again whose uid is in `waiting`."""
        again = set(waiting)
        draws = (self._source.draw(number) for number in range(num_drawn)) if again else ()
        self._waiting.extend(prompt for prompt in draws if prompt.uid in again)
        self.num_drawn = num_drawn

    def draw(self) -> Prompt | None:
        """Take the next prompt; None after the last one."""
        if not self.has_more:
            return None
        if self._waiting:
            return self._waiting.popleft()
        self.num_drawn += 1
        return self._source.draw(self.num_drawn - 1)
