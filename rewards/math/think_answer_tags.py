"""Score a response in <think> and <answer> tags: the `think_answer_tags` reward."""

from coati_rl.types import Score
from rewards.math.answer_format import THINK_ANSWER_TAGS
from rewards.math.extraction import last_answer_tag
from rewards.math.math_answer import check_answer


def think_answer_tags_reward(response: str, ground_truth: str, *, must_be_number: bool = True) -> Score:
    """Return 1.0 if the answer is correct and the format valid, else 0.0, as in ColossalChat.

    A correct answer in an invalid format is not `answer_correct`, as in ColossalChat's training (its evaluation ignores
    the format); the detail says that the answer is correct. For `must_be_number` see `check_answer`.
    """
    decision = check_answer(last_answer_tag(response), ground_truth, must_be_number=must_be_number)
    is_correct = decision.verdict == "ok"
    is_valid = THINK_ANSWER_TAGS.is_valid(response)
    if is_correct and not is_valid:
        detail = f"{decision.detail}, but not {THINK_ANSWER_TAGS.description}"
        return Score(reward=0.0, answer_correct=False, format_valid=False, verdict="wrong", detail=detail)
    return Score(
        reward=1.0 if is_correct else 0.0,
        answer_correct=is_correct,
        format_valid=is_valid,
        verdict=decision.verdict,
        detail=decision.detail,
    )
