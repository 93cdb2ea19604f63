r"""Test that `\pm` is expanded to two values where math-verify does not expand it."""

import pytest

from rewards.math.math_answer import check_answer
from rewards.math.plus_minus import expand_plus_minus


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        (r"\frac{-1\pm\sqrt{13}}{4}", r"\frac{-1+\sqrt{13}}{4},\frac{-1-\sqrt{13}}{4}"),
        (r"x=\frac{\pm 1}{2}", r"x=\frac{1}{2},x=\frac{-1}{2}"),
        (r"x=0, x=\pm2", r"x=0, x=2, x=-2"),
        (r"\sqrt{3 \pm 2}", r"\sqrt{3 +2},\sqrt{3 -2}"),
    ],
)
def test_two_values_stand_in_the_place_of_one(text: str, expanded: str) -> None:
    assert expand_plus_minus(text) == expanded


@pytest.mark.parametrize(
    "text", [r"\pm 2", r"1\pm\sqrt2", r"0,\pm 2", r"\{0,\pm1\}", r"\frac{\pm1\pm2}{3}", r"\pmod{5}", "x"]
)
def test_what_math_verify_reads_or_is_ambiguous_stays(text: str) -> None:
    assert expand_plus_minus(text) == text


@pytest.mark.parametrize(
    ("ground_truth", "answers"),
    [
        (
            r"\frac{-1\pm\sqrt{13}}{4}",
            [r"\frac{-1+\sqrt{13}}{4}, \frac{-1-\sqrt{13}}{4}", r"x=\frac{-1\pm\sqrt{13}}{4}"],
        ),
        (r"x=0, x=\pm2\sqrt2", [r"x=\pm2\sqrt2, x=0", r"0, 2\sqrt2, -2\sqrt2"]),
    ],
)
def test_both_values_are_the_answer(ground_truth: str, answers: list[str]) -> None:
    for answer in [ground_truth, *answers]:
        assert check_answer(answer, ground_truth).verdict == "ok"
    assert check_answer(r"\frac{-1+\sqrt{13}}{4}", ground_truth).verdict == "wrong"
