r"""The `boxed` reward: a response flows in whose final answer stands in \boxed{}, a score of 1 or 0 flows out."""

from coati_rl.types import Score
from rewards.math.extraction import last_boxed
from rewards.math.math_answer import check_answer


def boxed_reward(response: str, ground_truth: str) -> Score:
    r"""1.0 when the last closed \boxed{} holds the ground truth's value, else 0.0.

    `format_valid` says that there is a closed \boxed{}; it earns nothing by itself.
    """
    answer = last_boxed(response)
    decision = check_answer(answer, ground_truth)
    is_correct = decision.verdict == "ok"
    return Score(
        reward=1.0 if is_correct else 0.0,
        answer_correct=is_correct,
        format_valid=answer is not None,
        verdict=decision.verdict,
        detail=decision.detail,
    )
