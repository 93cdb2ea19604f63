"""Test extraction of the final answer of a response."""

import time

import pytest

from rewards.math.extraction import has_balanced_braces, last_answer_tag, last_boxed


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{72}", "72"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{23}}", r"\frac{1}{23}"),
        (r"\boxed{a^{b^{c}}} and more", "a^{b^{c}}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed {3}", "3"),
        (r"\\boxed{3}", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"a stray } and { before \boxed{5}", "5"),
        ("\\boxed{1\n2}", "1\n2"),
        (r"\boxed{}", ""),
    ],
)
def test_the_content_of_the_last_box_is_found_whatever_is_nested_in_it(text: str, content: str) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize("text", ["", "72", r"\fbox{72}", r"\boxed 72", "boxed{72}", r"\boxed{72"])
def test_there_is_no_box_in_text_without_a_closed_one(text: str) -> None:
    assert last_boxed(text) is None


def test_a_box_that_is_never_closed_gives_way_to_an_earlier_closed_one() -> None:
    assert last_boxed(r"\boxed{1} or rather \boxed{2") == "1"


def test_a_box_inside_one_that_is_never_closed_counts() -> None:
    assert last_boxed(r"\boxed{1 or rather \boxed{2}") == "2"


def test_an_escaped_brace_does_not_close_a_box() -> None:
    assert last_boxed(r"\boxed{72\}") is None


def test_thousands_of_open_boxes_are_searched_in_linear_time() -> None:
    started = time.perf_counter()
    assert last_boxed(r"\boxed{" * 50_000) is None
    assert time.perf_counter() - started < 1.0  # 0.03 s here; the quadratic search takes minutes


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<answer> 72 </answer>", " 72 "),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>1 <answer>2</answer>", "2"),
        ("<answer>1</answer> no, <answer>2", "1"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer></answer>", ""),
    ],
)
def test_the_content_of_the_last_closed_answer_tag_is_found(text: str, content: str) -> None:
    assert last_answer_tag(text) == content


@pytest.mark.parametrize("text", ["", "72", "<answer>72", "72</answer>", "</answer>72<answer>", "<Answer>72</Answer>"])
def test_there_is_no_answer_in_text_without_a_closed_tag(text: str) -> None:
    assert last_answer_tag(text) is None


@pytest.mark.parametrize("text", ["", "72", r"\frac{1}{2}", r"\{1, 2\}", r"\left\{ x", r"\boxed{5}"])
def test_braces_balance_when_each_unescaped_one_has_its_partner(text: str) -> None:
    assert has_balanced_braces(text)


@pytest.mark.parametrize("text", [r"\frac{1}{2", "5}", "}{", r"\boxed{5", r"{5\}"])
def test_braces_do_not_balance_when_one_is_missing_or_out_of_order(text: str) -> None:
    assert not has_balanced_braces(text)
