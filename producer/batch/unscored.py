"""Stand in for a scorer where responses are not scored."""

import math
from collections.abc import Sequence
from concurrent.futures import Future

from coati_rl.types import Problem, Score

_NO_SCORE = Score(reward=math.nan, answer_correct=False, format_valid=False, verdict="invalid")


class Unscored:
    """Implement `GroupScorer`: no response has a verdict."""

    def submit(self, responses: Sequence[str], problem: Problem) -> Future[list[Score]]:
        future: Future[list[Score]] = Future()
        future.set_result([_NO_SCORE] * len(responses))
        return future

    def close(self) -> None:
        """See `GroupScorer.close`."""
