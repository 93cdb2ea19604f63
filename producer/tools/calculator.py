"""Compute arithmetic expressions, bounded in size, so that no expression takes time or memory."""

import ast
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from producer.tools.tool import Schema, Tool, ToolError, make_schema

_MAX_CHARACTERS = 1000  # of an expression
_MAX_DEPTH = 100
_MAX_BITS = 4096  # of an integer, 1,233 digits
_MAX_FACTORIAL = 400  # of which 868 digits come
_DIGITS = 12  # of a result that is no integer
_EXACT = 2**53  # whole numbers below it are exact as floats
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "asin")},
    **{name: getattr(math, name) for name in ("acos", "atan", "atan2", "floor", "ceil", "gcd", "degrees", "radians")},
    **{"abs": abs, "min": min, "max": max, "round": round, "factorial": math.factorial},
}
_CONSTANTS = {"pi": math.pi, "e": math.e}
_Number = int | float


class Calculator:
    """Implement `Tool` and `ToolKit`: it keeps nothing, so that one object serves all episodes."""

    schema: Schema = make_schema(
        "calculator",
        "Compute an arithmetic expression.",
        expression="In Python's notation, with + - * / // % ** and functions such as sqrt: 2 * (3 + 4) ** 2.",
    )
    schemas: Sequence[Schema] = (schema,)

    def open(self) -> Sequence[Tool]:
        return [_OfEpisode()]

    def close(self) -> None:
        """See `ToolKit.close`."""


class _OfEpisode:
    schema = Calculator.schema

    async def call(self, arguments: dict[str, Any]) -> str:
        return calculate(arguments["expression"])

    async def close(self) -> None:
        pass


def calculate(expression: str) -> str:
    """Return the value of an expression: all digits of a whole number, 12 of others. Raises: ToolError.

    A quotient that is a whole number has them below 2**53.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ToolError(f"the expression has more than {_MAX_CHARACTERS} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body, depth=0)
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the result is too large") from None
    except (SyntaxError, RecursionError, MemoryError):
        raise ToolError(f"{expression[:100]!r} is not an arithmetic expression") from None
    except (ValueError, TypeError) as error:  # sqrt(-1), log(), min(1)
        raise ToolError(str(error)) from None
    return str(value) if isinstance(value, int) else _as_text(value)


def _as_text(value: float) -> str:
    if not math.isfinite(value):
        raise ToolError("the result is too large")
    return str(int(value)) if value.is_integer() and abs(value) < _EXACT else f"{value:.{_DIGITS}g}"


def _value(node: ast.expr, *, depth: int) -> _Number:
    if depth > _MAX_DEPTH:
        raise ToolError(f"the expression is nested more than {_MAX_DEPTH} deep")
    match node:
        case ast.Constant(value=bool() | complex() | str() | bytes() | None):
            pass
        case ast.Constant(value=int() | float()):
            return _bounded(node.value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.UAdd() | ast.USub()):
            value = _value(node.operand, depth=depth + 1)
            return -value if isinstance(node.op, ast.USub) else value
        case ast.BinOp():
            left, right = _value(node.left, depth=depth + 1), _value(node.right, depth=depth + 1)
            return _bounded(_power(left, right) if isinstance(node.op, ast.Pow) else _operator(node.op)(left, right))
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            if name not in _FUNCTIONS:
                raise ToolError(f"there is no function {name[:50]}; there are {', '.join(sorted(_FUNCTIONS))}")
            return _bounded(_called(name, [_value(each, depth=depth + 1) for each in node.args]))
    raise ToolError(f"{ast.unparse(node)[:100] if depth == 0 else 'a part'} is not arithmetic")


def _operator(kind: ast.operator) -> Callable[[Any, Any], Any]:
    if type(kind) not in _OPERATORS:
        raise ToolError("use + - * / // % and ** for powers")
    return _OPERATORS[type(kind)]


def _called(name: str, values: list[_Number]) -> Any:
    if name == "factorial" and max(values, default=0) > _MAX_FACTORIAL:
        raise ToolError("the result is too large")
    if name == "round" and len(values) == 2 and not 0 <= abs(values[1]) <= _MAX_CHARACTERS:
        raise ToolError("round to fewer digits")
    return _FUNCTIONS[name](*values)


def _power(base: _Number, exponent: _Number) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > 2 * _MAX_BITS:
        raise ToolError("the result is too large")
    return base**exponent


def _bounded(value: Any) -> _Number:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ToolError("the result is too large")
    if not isinstance(value, int | float):
        raise ToolError("the result is not a real number")
    return value
