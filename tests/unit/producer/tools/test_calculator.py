"""Test the calculator: values by hand, and expressions that must not take time."""

import time

import pytest

from producer.tools.calculator import calculate
from producer.tools.tool import ToolError


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 * (3 + 4) ** 2", "98"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("0.1 + 0.2", "0.3"),
        ("6 / 2", "3"),
        ("1 / 3", "0.333333333333"),
        ("2 ** -1", "0.5"),
        ("123456789 * 987654321", "121932631112635269"),
        ("sqrt(16) + max(1, 2.5) + abs(-1)", "7.5"),
        ("round(2.567, 1)", "2.6"),
        ("factorial(20)", "2432902008176640000"),
        ("1e300", "1e+300"),
        ("1234567890123456 / 2", "617283945061728"),
        ("2**54 / 1", "1.80143985095e+16"),
        (" pi", "3.14159265359"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "division by zero"),
        ("2 ^ 3", "use .* and \\*\\* for powers"),
        ("sqrt(-1)", "math domain error"),
        ("(-8) ** 0.5", "not a real number"),
        ("x + 1", "is not arithmetic"),
        ("1,000", "is not arithmetic"),
        ("'a' * 9", "is not arithmetic"),
        ("True", "is not arithmetic"),
        ("__import__('os').getpid()", "is not arithmetic"),
        ("open('f')", "there is no function open; there are .* sqrt"),
        ("(1).bit_length()", "is not arithmetic"),
        ("[n for n in (1,)]", "is not arithmetic"),
        ("2 *", "is not an arithmetic expression"),
        ("", "is not an arithmetic expression"),
        ("max(1, 2, key=abs)", "is not arithmetic"),
    ],
)
def test_what_is_no_arithmetic_is_an_error_that_says_so(expression: str, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        calculate(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "9 ** 9 ** 9",
        "2 ** 10000",
        "10 ** 300 ** 300",
        "1e308 * 10",
        "10 ** 400 / 1.5",
        "factorial(401)",
        "factorial(factorial(20))",
        "*".join(["9" * 300] * 3) + " ** 900",
        "9" * 900 + "*" + "9" * 90 + "**9",
        "round(1, 10 ** 9)",
        "-" * 990 + "1",
        "(" * 500 + "1" + ")" * 499,
        "1" + "+1" * 499,
        "1" * 1001,
        "exp(10 ** 9)",
        "floor(1e308 * 10)",
    ],
    ids=lambda text: text[:20],
)
def test_no_expression_takes_time_or_memory(expression: str) -> None:
    started = time.process_time()
    with pytest.raises(ToolError):
        calculate(expression)
    assert time.process_time() - started < 0.5
