"""Test decisions of the comparison that do not depend on an answer's value; see also test_math_answer_table.py."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from rewards.math import math_answer
from rewards.math.math_answer import check_answer, clear_caches, compare_by_math_verify

UNREADABLE = [
    "",
    "   ",
    r"\frac{",
    r"\frac{12}{3",
    "5}",
    "{5",
    "1 2",
    r"5 \frac{",
    "5, \\frac{1}{2}, ,",
    "the answer [5] (",
]


@pytest.mark.parametrize("answer", UNREADABLE)
def test_an_answer_that_does_not_parse_is_wrong(answer: str) -> None:
    decision = check_answer(answer, "5")
    assert decision.verdict == "wrong"
    assert "does not parse" in decision.detail


def test_of_an_answer_that_does_not_parse_no_part_counts() -> None:
    assert check_answer(r"\frac{1}{3}, or \frac{1}{2}, ,", r"\frac{1}{2}").verdict == "wrong"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("answer", ["5", "1/0", r"\frac{", None])
@pytest.mark.parametrize("ground_truth", [*UNREADABLE, "1/0", "0/0", r"\frac{3}{0}"])
def test_a_broken_ground_truth_is_invalid_for_every_answer(ground_truth: str, answer: str | None) -> None:
    decision = check_answer(answer, ground_truth)
    assert decision.verdict == "invalid"
    assert decision.detail.startswith("the ground truth")


@pytest.mark.parametrize("ground_truth", ["1/0", r"\frac{1}{0}", "x=", r"\frac{"])
def test_the_text_of_a_broken_ground_truth_is_no_right_answer(ground_truth: str) -> None:
    assert check_answer(ground_truth, ground_truth).verdict == "invalid"


@pytest.mark.parametrize("ground_truth", ["5", r"\sqrt{2}", r"\text{yes}", r"\sin^2 x", "$5$"])
def test_a_missing_answer_is_wrong(ground_truth: str) -> None:
    assert check_answer(None, ground_truth).verdict == "wrong"
    assert check_answer(None, ground_truth).detail == "no answer found"


@pytest.mark.parametrize(
    ("ground_truth", "answer"),
    [
        ("1e-05", "0.00001"),
        ("1e+20", "10^{20}"),
        ("2.5e-07", "0.00000025"),
        ("3.0", "3"),
        ("-0.0", "0"),
        (str(7**99), "7^{99}"),
    ],
)
def test_a_ground_truth_may_be_the_text_of_a_json_number(ground_truth: str, answer: str) -> None:
    assert check_answer(answer, ground_truth).verdict == "ok"
    assert check_answer("7", ground_truth).verdict == "wrong"


def test_a_comparison_that_fails_is_invalid_and_names_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gold: object, answer: object) -> bool:
        raise NotImplementedError("no such function")

    monkeypatch.setattr(math_answer, "_verify", fail)
    decision = compare_by_math_verify("41.125", "42.875")
    assert decision.verdict == "invalid"
    assert decision.detail == "the comparison failed: NotImplementedError: no such function"


@pytest.fixture
def a_workers_recursion_limit() -> Iterator[None]:
    """Python's own; torch raises this process's for good when it has compiled something."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.full
def test_a_unit_with_an_exponent_is_no_factor_of_a_formula() -> None:
    for answer in (r"16\pi cm^2", "16\\pi cm\u00b2", r"16\pi \text{ cm}^2"):
        assert check_answer(answer, r"16\pi").verdict == "ok"
        assert check_answer(answer, r"16\pi^2").verdict == "wrong"
    assert check_answer("3m^2", "3").verdict == check_answer("3cm^2", "3c").verdict == "wrong"


@pytest.mark.full
@pytest.mark.usefixtures("a_workers_recursion_limit")
def test_an_answer_that_is_too_deep_to_be_read_is_invalid_not_wrong() -> None:
    decision = compare_by_math_verify("-" * 400 + "1", "1")
    assert decision.verdict == "invalid"
    assert decision.detail.startswith("the comparison failed: RecursionError")


def test_an_explanation_is_one_short_line() -> None:
    for answer in ("5\n" + "+1" * 100, "5\n" * 10_000):
        detail = check_answer(answer, "5").detail
        assert "\n" not in detail
        assert len(detail) < 250


def test_the_same_pair_is_decided_once() -> None:
    clear_caches()
    for _ in range(3):
        check_answer(r"\sin 2x", r"2 \sin x \cos x")
    assert math_answer._check.cache_info().misses == 1
    assert math_answer._parse.cache_info().misses == 2


def test_long_texts_are_kept_in_no_cache() -> None:
    clear_caches()
    for number in range(100):
        assert check_answer(f"{number}" * 2000, "72").verdict == "invalid"
    caches = (math_answer._check, math_answer._rewrite, math_answer._parse)
    assert [cache.cache_info().currsize for cache in caches] == [0, 0, 0]


def test_plain_numbers_are_compared_without_a_computer_algebra_system() -> None:
    code = (
        "import sys; from rewards.math.math_answer import check_answer as c; "
        "assert [c('72.0', '72').verdict, c('$1/3$', '1/2').verdict] == ['ok', 'wrong']; c(None, '7'); "
        "assert not {'sympy', 'math_verify', 'mpmath', 'antlr4'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
