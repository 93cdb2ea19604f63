"""Test that a numeric ground truth needs a number: restating the task gets no reward."""

import time

import pytest

from rewards import get_reward
from rewards.math.answer_latex import to_latex
from rewards.math.math_answer import check_answer
from rewards.math.number_answer import is_number, states_number
from tests.unit.rewards.test_math_answer_table import RIGHT, WRONG

# Their value is right.
RESTATED = {
    "72": [
        "27 + 45", "27+45=72", "1=2=72", "72=72", r"8 \times 9", r"8 \cdot 9", "6*12", "100-28", "72+0", "72^1",
        "-(-72)", "--72", "|-72|", r"\sqrt{5184}", r"\max(72,1)", r"\frac{27+45}{1}", r"\frac{\frac{144}{2}}{1}",
        "x=70+2", "The answer is $70+2$", r"\{70+2\}", r"\int_0^{72} dx", r"\log_2 2^{72}", r"\lfloor 72.5 \rfloor",
        r"\binom{72}{1}", r"72\times1", "72/1/1", "\uff12\uff17\uff0b\uff14\uff15", "72 + 0i",
    ],
    "5050": [r"\sum_{k=1}^{100} k", r"\frac{100 \cdot 101}{2}", "100*101/2"],
    "6": ["3!", r"\frac{12}{2}+0"],
    r"\frac{1}{2}": [r"\sin\frac{\pi}{6}", r"1-\frac{1}{2}", r"2^{-1}"],
    "2.828427": [r"2\sqrt{2}"],
    r"50\%": ["1-0.5"],
    "x=5": ["2+3", "x=2+3"],
    "8": ["2^3"],
}  # fmt: skip
NUMBERS = {
    "72": [
        "72", "72.0", "+72", "7.2e1", r"7.2 \times 10^1", "144/2", r"\frac{144}{2}", r"\dfrac{72}{1}", "72%", "72 cm",
        r"72 \text{ cm}^2", r"72 \text{ cm^2}", r"72 \text{ m/s^2}", r"72\,\mathrm{m\,s^{-2}}",
        r"72\,\text{m}/\text{s}", r"72^\circ", r"\$72", "72 dollars", "72 eggs", "x=72",
        "x = y = 72", "f(2)=72", "x+y=72", r"\angle ABC = 72^\circ", r"\text{Answer} = 72", r"x \approx 72",
        r"\mathbf{72}", r"\left(72\right)", "{72}", r"\{72\}", "The answer is $72$", r"x = \boxed{72}", r"72\quad",
        "\uff17\uff12", "\uff17\uff12\uff0e\uff10",
        r"72\$", "72.00$", r"x=72\,\$", "72 €", "€72", "72 USD", "USD 72", "Rs. 72", r"\text{\$}72",
        r"\text{72 dollars}", "72 cm²", "72cm^2", "72 ft^{3}", "72 units^2", "72°C", r"72^\circ F", r"72~\mathrm{cm}",
    ],
    "16 cm^2": ["16", r"16\text{ cm}^2", "16 cm²"],
    r"5\$": ["5", "$5", "5 dollars"],
    "-3": ["\u20113", "\u20103"],
    "1000000": ["10^6", "10^{6}", "1,000,000", r"1\,000\,000", r"1 \cdot 10^6"],
    "3.5": ["3 1/2", r"3\frac{1}{2}", "7/2", r"\frac72", "350%"],
    "-0.75": [r"-\frac{3}{4}", r"\frac{-3}{4}", r"\frac{3}{-4}", "-3/4", r"-75\%"],
    r"\frac{1}{2}": ["1:2", "0.5", r"50\%", ".5"],
    "0.00001": ["1e-5", "10^{-5}", r"1 \times 10^{-5}"],
    str(7**99): ["7^{99}"],  # nobody writes out 84 digits
}  # fmt: skip
NOT_NUMBERS = [
    r"\sqrt{2}",
    r"\pi",
    "x",
    "2^{100}",
    "1,2",
    "(1,2)",
    "yes",
    "x^2+y^2=25",
    "x=2 or x=3",
    "3!",
    "2+3",
    "3t",
    "3xyz",
    "3x^2",
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("truth", "answer"), [(truth, answer) for truth, all_ in RESTATED.items() for answer in all_])
def test_a_task_that_is_restated_is_wrong_unless_any_formula_may_answer(truth: str, answer: str) -> None:
    decision = check_answer(answer, truth, must_be_number=True)
    assert decision.verdict == "wrong"
    assert "is not a number, but" in decision.detail
    assert check_answer(answer, truth).verdict == "ok"


@pytest.mark.parametrize(("truth", "answer"), [(truth, answer) for truth, all_ in NUMBERS.items() for answer in all_])
def test_numbers_in_any_notation_are_right(truth: str, answer: str) -> None:
    assert check_answer(answer, truth, must_be_number=True).verdict == "ok"


@pytest.mark.parametrize("truth", NOT_NUMBERS)
def test_a_ground_truth_that_is_no_number_may_be_answered_by_any_formula(truth: str) -> None:
    assert not is_number(to_latex(truth) or "")


@pytest.mark.parametrize(
    "truth", ["5", "-1/2", "x=5", r"\$5", "5%", r"5\%", "5 cm", "5cm", r"5 \text{ m}", "5 hours", "1e5", "3 1/2", "90°"]
)
def test_a_ground_truth_may_be_a_number_with_a_unit(truth: str) -> None:
    assert is_number(to_latex(truth) or "")


@pytest.mark.full
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.full)])
def test_the_verdicts_of_the_table_are_the_same_but_for_a_sum(every: int) -> None:
    masked = {(truth, answer) for _, truth, answer in RIGHT[::every] if _verdict(answer, truth) != "ok"}
    assert masked <= {("5", "2+3")}
    assert {_verdict(answer, truth) for _, truth, answer in WRONG[::every]} == {"wrong"}
    assert _verdict("2+3", "5") != "ok"


def _verdict(answer: str, truth: str) -> str:
    return check_answer(answer, truth, must_be_number=True).verdict


@pytest.mark.parametrize(
    ("name", "form"), [("boxed", r"\boxed{%s}"), ("think_answer_tags", "<think></think><answer>%s</answer>")]
)
def test_the_rewards_do_not_pay_for_a_task_that_is_restated(name: str, form: str) -> None:
    verdicts = [get_reward(name)(form % answer, "72").verdict for answer in ("27 + 45", "1=2=72", "72", "\uff17\uff12")]
    assert verdicts == ["wrong", "wrong", "ok", "ok"]


def test_what_would_be_masked_is_wrong_where_a_number_belongs() -> None:
    for answer in ("9^{9^{9^9}}", "(" * 100 + "1" + ")" * 100, "20!!", "(x+1)^{5000}"):
        assert check_answer(answer, "72", must_be_number=True).verdict == "wrong"


@pytest.mark.parametrize(
    "part", ["1", "1 ", "a", "a ", "(", "{", "=", "x=", "$", r"\(", r"\frac", r"\text{a}", "/", "%"]
)
def test_a_thousand_characters_of_anything_take_milliseconds(part: str) -> None:
    text = (part * 1000)[:999] + "#"
    seconds = []
    for _ in range(3):
        started = time.process_time()
        states_number(text)
        is_number(text)
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.05  # less than 2 ms on an idle core
