"""Test that plain numbers are compared as math-verify compares them."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from rewards.math.math_answer import check_answer, compare_by_math_verify
from rewards.math.plain_numbers import are_equal, read_plain_number

# Values next to each other in all notations; 0.1234565 is a tie at the sixth place.
VALUES = r"""
0 -0 00 0.0 -0.0 1 01 1.0 -1 +1 1. 3 -3 12 10 100 1000 1,000 1,000.0 1,000.50 1000.5 12,345,678 12345678 0.5 .5 -.5
+0.5 -0.5 0.50 00.5 1/2 -1/2 +1/2 2/4 01/2 2/1 6/3 0/5 \frac{1}{2} -\frac{1}{2} \frac{-1}{2} \frac12 \dfrac{1}{2}
\frac{1}{23} \frac{12}{3} 4 1/3 0.3 0.33 0.333333 0.3333333 0.333334 0.3333335 2/3 0.666667 0.666666 0.1234565
0.1234564 0.123456 0.123457 72 72.0 72.0000001 72.000001 145/2 72.5 72.5000001 72.5000006 0.0000001 0.0000002
1/10000000 0.000001 0.0000005 0.0999999999 0.1 0.10000000001 999999999.9999999 1000000000 1000000000.0000001
123456789012345.6 123456789012345678901234567890 $5 \$5 5 5.00 -$5 0.1 0.10 1/7 0.142857 0.1428571 0.142858 22/7
3.142857 3.14
""".split()  # noqa: SIM905 - a hundred numbers are easier to read so
NOT_PLAIN = [
    "",
    "x",
    "1 2",
    "1,00",
    "1,0000",
    "0,500",
    "01,000",
    "1,2",
    "5%",
    "1/0",
    "0/0",
    r"\frac{1}{0}",
    "1/2/3",
    "--5",
]
NOT_PLAIN += [
    "1e5",
    "½",
    "٣",
    "²",
    "1_000",
    "1.5/2",
    "0x10",
    "5.",
    "1 / -2",
    "9" * 101,
    "0.1234567890123456",
    "(5)",
    "5 cm",
]


def decide(answer: str, ground_truth: str) -> str | None:
    """The verdict of the fast comparison; None where it leaves the pair alone."""
    number, truth = read_plain_number(answer), read_plain_number(ground_truth)
    is_equal = None if number is None or truth is None else are_equal(truth, number)
    return None if is_equal is None else "ok" if is_equal else "wrong"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("ground_truth", VALUES)
def test_every_pair_of_the_list_has_the_verdict_of_math_verify(ground_truth: str) -> None:
    answers = VALUES[VALUES.index(ground_truth) :]  # each pair once; drawn pairs are compared in either order below
    verdicts = {answer: decide(answer, ground_truth) for answer in answers}
    taken = [answer for answer, verdict in verdicts.items() if verdict is not None]
    assert verdicts == verdicts | {answer: compare_by_math_verify(answer, ground_truth).verdict for answer in taken}


def test_nine_of_ten_pairs_of_the_list_are_taken() -> None:
    taken = [decide(answer, truth) is not None for answer in VALUES for truth in VALUES]
    assert sum(taken) / len(taken) > 0.9


@pytest.mark.parametrize("text", NOT_PLAIN)
def test_what_is_no_plain_number_or_not_defined_is_left_alone(text: str) -> None:
    assert read_plain_number(text) is None


@pytest.mark.parametrize(
    ("first", "second", "is_equal"),
    [
        ("0.333333", "1/3", True),
        ("0.33", "1/3", False),
        ("72.0000001", "72", False),  # an integer is exact
        ("72.5000001", "145/2", True),  # equal to six places
        ("0.5", "5000001/10000000", False),  # the text 0.5 is a fraction
        ("0.50", "5000001/10000000", True),
        ("0.1234565", "0.123456", True),  # half to even
        ("0.1234575", "0.123458", True),
    ],
)
def test_a_decimal_is_compared_to_six_places(first: str, second: str, is_equal: bool) -> None:
    one, other = read_plain_number(first), read_plain_number(second)
    assert one
    assert other
    assert are_equal(one, other) is is_equal
    assert are_equal(other, one) is is_equal


@pytest.mark.parametrize(("first", "second"), [("0.0000001", "0.0000002"), ("1234567890.1", "1234567890.1000001")])
def test_close_decimals_that_are_very_small_or_large_are_left_alone(first: str, second: str) -> None:
    assert decide(first, second) is None


digits = st.integers(0, 10**9)
signs = st.sampled_from(["", "-", "+"])
numbers = st.one_of(
    st.builds("{}{}".format, signs, st.integers(0, 10**20)),
    st.builds("{}{:,}".format, signs, st.integers(0, 10**8)),
    st.builds("{}{}.{}".format, signs, st.integers(0, 2000), st.integers(0, 10**8)),
    st.builds("{}{:.{}f}".format, signs, st.floats(0, 1e6), st.integers(1, 8)),
    st.builds("{}{}/{}".format, signs, st.integers(0, 500), st.integers(0, 60)),
    st.builds(r"{}\frac{{{}}}{{{}}}".format, signs, digits, digits),
)


@st.composite
def neighbours(draw: st.DrawFn) -> tuple[str, str]:
    """A decimal, and a number that is less than some millionths away from it."""
    places = draw(st.integers(4, 9))
    value = draw(st.integers(0, 10 ** (places + 3)))
    near = value * 10 ** (9 - places) + draw(st.integers(-3000, 3000))
    other = draw(st.sampled_from([f"{near / 10**9:.9f}", f"{near / 10**9:.7f}", rf"\frac{{{near}}}{{1000000000}}"]))
    return f"{value / 10**places:.{places}f}", other


# Numbers with an exponent, a percent sign, a currency or a dot too many are among these: most are left to math-verify.
lookalikes = st.text("0123456789.,-+/ $%eE", min_size=1, max_size=8)


class _TooSlowError(BaseException):
    """No Exception: the library and `compare_by_math_verify` catch those."""


@contextmanager
def cpu_time_limit(seconds: float) -> Iterator[None]:
    """Raises: _TooSlowError in the block once it has taken so much."""

    def stop(number: int, frame: object) -> None:
        raise _TooSlowError

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.5)  # again, since one that is raised in a __del__ is lost
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def assert_same_verdict(answer: str, ground_truth: str) -> None:
    try:
        with cpu_time_limit(0.5):
            expected = compare_by_math_verify(answer, ground_truth).verdict
    except _TooSlowError:
        reject()
    assert check_answer(answer, ground_truth).verdict == expected


@pytest.mark.full
@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.one_of(st.tuples(numbers, numbers), neighbours()))
def test_two_numbers_have_the_verdict_of_math_verify_in_either_order(pair: tuple[str, str]) -> None:
    assert_same_verdict(*pair)
    assert_same_verdict(*pair[::-1])


@pytest.mark.full
@settings(max_examples=150, deadline=None, derandomize=True)
@given(lookalikes, numbers)
def test_what_only_looks_like_a_number_has_the_verdict_of_math_verify(text: str, number: str) -> None:
    assert_same_verdict(text, number)
    assert_same_verdict(number, text)


@pytest.mark.parametrize("half", ["0.5", "+0.5", "$0.5$", "0.50", "-0.5", ".5"])
def test_the_half_that_is_a_fraction_is_the_one_that_math_verify_reads(half: str) -> None:
    for near in ("5000001/10000000", "-5000001/10000000"):
        assert_same_verdict(half, near)
        assert_same_verdict(near, half)


def test_an_example_is_stopped_after_its_cpu_time() -> None:
    started = time.process_time()
    with pytest.raises(_TooSlowError), cpu_time_limit(0.05):
        compare_by_math_verify(r"y=e^{3 \cdot x^2+\sqrt{x}}", r"y=\sqrt{101.5}")  # 296 s
    assert time.process_time() - started < 2
