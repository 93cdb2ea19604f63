"""Test answers as texts: unreadable text equals itself, and reordered words are not equal."""

import pytest

from rewards.math.math_answer import check_answer, compare_by_math_verify

UNPARSABLE = [r"a \otimes b", r"\frac{1}{2}\%", r"A \xrightarrow{f} B", "10^{10^{10}}"]


@pytest.mark.parametrize("ground_truth", UNPARSABLE)
def test_a_ground_truth_that_does_not_parse_is_equal_to_the_same_text_alone(ground_truth: str) -> None:
    for answer in (ground_truth, f" ${ground_truth}$. ", ground_truth.replace(" ", r"\, ")):
        assert check_answer(answer, ground_truth).verdict == "ok"
    assert check_answer("5", ground_truth).verdict == "invalid"
    assert check_answer(None, ground_truth).verdict == "invalid"


@pytest.mark.parametrize(
    "ground_truth",
    [
        r"$$a \otimes b$$ $$c \otimes d$$",
        r"\[a \otimes b\] \(c \otimes d\)",
        r"$a \otimes b$ $c \otimes d$",
        r"$$a \otimes b \\ c \otimes d$$",
        r"$x=1$ for $y=2$ for $z=3$",
        "$$72$$",
        r"\[\frac{144}{2}\]",
    ],
)
def test_the_text_of_the_ground_truth_is_right_with_any_delimiters_and_with_none(ground_truth: str) -> None:
    bare = ground_truth
    for delimiter in ("$$", "$", r"\[", r"\]", r"\(", r"\)"):
        bare = bare.replace(delimiter, "")
    for answer in (ground_truth, bare, f"${bare}$", f"$${bare}$$", rf"\[{bare}\]"):
        for truth in (ground_truth, bare):
            assert check_answer(answer, truth, must_be_number=True).verdict == "ok"


@pytest.mark.parametrize("ground_truth", ["1/0", r"\frac{1}{0}", "x=", r"\frac{", "", "5, ,", "the answer [5] ("])
def test_a_ground_truth_that_is_broken_or_not_defined_is_equal_to_nothing(ground_truth: str) -> None:
    assert check_answer(ground_truth, ground_truth).verdict == "invalid"


def test_space_between_digits_is_part_of_the_text() -> None:
    assert check_answer("31/2", "3 1/2").verdict == "wrong"


@pytest.mark.parametrize(
    ("ground_truth", "answer"),
    [("no", "on"), ("AB", "BA"), ("yes", "sey"), (r"\text{no}", "on"), ("(AB)", "BA"), ("AB", "B A"), ("ABC", "CAB")],
)  # fmt: skip
def test_a_word_in_another_order_is_wrong(ground_truth: str, answer: str) -> None:
    assert check_answer(answer, ground_truth).verdict == "wrong"
    assert check_answer(ground_truth, answer).verdict == "wrong"
    assert compare_by_math_verify(answer, ground_truth).verdict == "wrong"


@pytest.mark.parametrize(
    ("ground_truth", "answer"), [("no", "No"), ("AB", r"\text{AB}"), ("xy", "yx"), ("abc", "cab"), ("AB", r"B \cdot A")]
)
def test_the_same_word_and_a_product_of_variables_are_right(ground_truth: str, answer: str) -> None:
    assert check_answer(answer, ground_truth).verdict == "ok"
