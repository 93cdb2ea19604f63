"""Score a response with the verifier of the generator that made its row: the `reasoning_gym` reward.

The answer is the text of the last <answer> tags, as the package reads it, and the reward the verifier's: 1 for a
right answer, and for many generators a part of it for one that is nearly right or merely readable. A response without
the tags is wrong. A verifier that raises makes the response invalid.
"""

import re
from collections.abc import Iterator, Sequence

from coati_rl.reading.generators import load_package, score_answer
from coati_rl.text import shorten
from coati_rl.types import Problem, Score
from rewards.reward import bounded, invalid_score

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class GeneratedReward:
    """Implement `Reward` with the verifiers of the package.

    Args:
        correct_from: the reward that makes an answer correct.
    Raises: ConfigError without the package.
    """

    is_batch = False
    only_computes = True

    def __init__(self, *, correct_from: float = 1.0) -> None:
        self._correct_from = correct_from
        load_package()

    def score(self, responses: Sequence[str], problem: Problem) -> Iterator[Score]:
        for response in responses:
            yield self._score_one(response, problem)

    def _score_one(self, response: str, problem: Problem) -> Score:
        answers = _ANSWER.findall(response)
        if not answers:
            detail = "no <answer></answer>"
            return Score(reward=0.0, answer_correct=False, format_valid=False, verdict="wrong", detail=detail)
        answer = answers[-1].strip()
        try:
            reward = score_answer(answer, problem.columns, problem.ground_truth)
        except Exception as error:  # noqa: BLE001 - a failed verifier is counted as invalid, never as zero
            return invalid_score(f"the verifier failed: {type(error).__name__}: {shorten(error)}")
        is_correct = reward >= self._correct_from
        return bounded(
            Score(
                reward=reward,
                answer_correct=is_correct,
                format_valid=True,
                verdict="ok" if is_correct else "wrong",
                detail=f"{shorten(answer, 80)}: {reward:g}",
            )
        )
