r"""Score a response by the final answer in its \boxed{}: the `boxed` reward."""

from coati_rl.types import Score
from rewards.math.extraction import last_boxed
from rewards.math.math_answer import check_answer


def boxed_reward(response: str, ground_truth: str, *, must_be_number: bool = True) -> Score:
    r"""Return 1.0 if the last closed \boxed{} holds the ground truth's value, else 0.0.

    `format_valid` is True if there is a closed \boxed{}; it adds no reward. For `must_be_number` see `check_answer`.
    """
    answer = last_boxed(response)
    decision = check_answer(answer, ground_truth, must_be_number=must_be_number)
    is_correct = decision.verdict == "ok"
    return Score(
        reward=1.0 if is_correct else 0.0,
        answer_correct=is_correct,
        format_valid=answer is not None,
        verdict=decision.verdict,
        detail=decision.detail,
    )
