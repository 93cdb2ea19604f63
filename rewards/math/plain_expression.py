r"""Reads a plain expression: tokens of LaTeX flow in, a `Value` flows out.

    expression = ["-"] product {("+" | "-") product}
    product    = factors {"\cdot" factors}
    factors    = {power} [function]                       without a sign between them: `2x`, `2\frac{1}{2}`, `2\sin x`
    function   = (\sin | \cos | \tan | \ln | \log ["_" braces]) (braces | "(" expression ")" | factors)
    power      = atom ["^" braces] | e "^" braces | integer "!"
    atom       = number | letter | \pi | "(" expression ")" | \frac braces braces | \binom braces braces
               | \sqrt ["[" digit "]"] braces
    braces     = "{" expression "}"

What math-verify reads in another way than people do is refused.
"""

from collections.abc import Sequence
from math import comb, factorial

from rewards.math import sampled_value as values
from rewards.math.plain_numbers import PlainNumber
from rewards.math.sampled_value import Value

_MAX_DEPTH, _MAX_FACTORIAL, _MAX_BINOMIAL = 8, 30, 60
FUNCTIONS = frozenset((r"\sin", r"\cos", r"\tan", r"\ln", r"\log"))


class NotPlainError(Exception):
    """The tokens are no plain expression."""


class TokenReader:
    """A position in a list of tokens."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = (*tokens, "")  # the last stands for the end
        self._position = 0

    @property
    def next(self) -> str:
        """The token at the position; "" at the end."""
        return self._tokens[self._position]

    def rewind(self) -> None:
        """Go back to the first token."""
        self._position = 0

    def take(self) -> str:
        """Step over a token, whatever it is."""
        self._position += 1
        return self._tokens[self._position - 1]

    def accept(self, *tokens: str) -> str:
        """Step over the token if it is one of these; "" if it is not."""
        return self.take() if self.next and self.next in tokens else ""

    def expect(self, *tokens: str) -> str:
        """Step over the token.

        Raises: NotPlainError if it is none of these.
        """
        if not (token := self.accept(*tokens)):
            raise NotPlainError
        return token


class ExpressionReader(TokenReader):
    """Reads expressions at the position. Raises: NotPlainError, UndefinedValueError."""

    _depth = 0

    def rewind(self) -> None:
        """Go back to the first token."""
        super().rewind()
        self._depth = 0

    def expression(self) -> Value:
        """A sum, or anything less."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NotPlainError
        value = self._product(is_negative=bool(self.accept("-")))
        while sign := self.accept("+", "-"):
            value = values.add(value, self._product(is_negative=sign == "-"))
        self._depth -= 1
        return value

    def _product(self, *, is_negative: bool) -> Value:
        value = self._factors()
        if is_negative:
            value = values.negate(value)
        while self.accept(r"\cdot"):
            value = values.multiply(value, self._factors())
        return value

    def _factors(self) -> Value:
        if self.next in FUNCTIONS:
            return self._function()
        is_integer = self.next.isdigit()
        value = self._power()
        is_mixed_number = is_integer and value.number is not None and self.next == r"\frac"
        if is_mixed_number:
            value = _mixed_number(value, self._power())
        while _begins_factor(self.next):
            is_group = self.next == "("
            is_sum = is_group and not {"+", "-"}.isdisjoint(self._tokens[self._position + 2 : self._end_of_group()])
            factor = self._power()
            # `x(y)` and `\pi(2)` are functions to math-verify, and `2(3)` is 2 + 3: it takes any integer before a
            # number for the whole part of a mixed number.
            is_argument = is_group and not (is_sum and factor.has_letter)
            if is_mixed_number or is_argument or factor.number is not None:
                raise NotPlainError
            value = values.multiply(value, factor)
        return values.multiply(value, self._function()) if self.next in FUNCTIONS else value

    def _end_of_group(self) -> int:
        """Where the next bracket closes, be it one within the group."""
        return self._tokens.index(")", self._position) if ")" in self._tokens[self._position :] else self._position

    def _function(self) -> Value:
        name = self.take()
        base = self._braces() if name == r"\log" and self.accept("_") else None
        begin, opening = self._position, self.next
        argument = self._braces() if opening == "{" else self._atom() if opening == "(" else self._factors()
        tokens = self._tokens[begin : self._position]
        # The first are where math-verify ends an argument without brackets, and what \sin \pi\pi is, 0, its own idea.
        if "e" in tokens or r"\sqrt" in tokens or tokens.count(r"\pi") > 1 or not FUNCTIONS.isdisjoint(tokens):
            raise NotPlainError
        if "(" in tokens and opening not in ("{", "("):
            raise NotPlainError
        if self.next in ("^", "!", r"\cdot") or self.next in FUNCTIONS or _begins_factor(self.next):
            raise NotPlainError  # it may belong to the argument
        value = values.function(name, argument)
        return value if base is None else values.divide(value, values.function(name, base))

    def _power(self) -> Value:
        is_integer = self.next.isdigit()
        value = self._power_of_e() if self.next == "e" else self._atom()
        if self.accept("^"):
            value = values.power(value, self._braces())
        elif is_integer and self.accept("!"):
            n = value.at_points[0]
            if n > _MAX_FACTORIAL:
                raise NotPlainError
            value = values.from_integer(factorial(int(n)))._replace(number=None)
        if self.next in ("^", "!") or self.next[:1].isdigit():
            raise NotPlainError
        return value

    def _atom(self) -> Value:
        token = self.take()
        if token[:1].isdigit():
            whole, _, decimals = token.partition(".")
            number = PlainNumber(int(whole + decimals), 10 ** len(decimals), is_decimal=bool(decimals))
            return values.from_number(number)
        if token.isalpha():
            return values.from_letter(token)
        if token == r"\pi":
            return values.PI
        if token == "(":
            value = self.expression()
            self.expect(")")
            return value
        if token == r"\frac":
            return values.divide(self._braces(), self._braces())
        if token == r"\sqrt":
            return self._root()
        if token == r"\binom":
            return _binomial(self._braces(), self._braces())
        raise NotPlainError

    def _power_of_e(self) -> Value:
        self.expect("e")
        self.expect("^")
        begin = self._position
        exponent = self._braces()
        # math-verify evaluates this power alone: to the number 1, or to x from e^{\log_2 x}.
        if any(x == 0 for x in exponent.at_points) or not FUNCTIONS.isdisjoint(self._tokens[begin : self._position]):
            raise NotPlainError
        return values.power(values.E, exponent)

    def _root(self) -> Value:
        if not self.accept("["):
            return values.square_root(self._braces())
        degree = self.expect(*"23456789")
        self.expect("]")
        return values.power(self._braces(), values.from_number(PlainNumber(1, int(degree), is_decimal=False)))

    def _braces(self) -> Value:
        self.expect("{")
        value = self.expression()
        self.expect("}")
        return value


def _begins_factor(token: str) -> bool:
    return token.isalpha() or token in ("(", r"\frac", r"\sqrt", r"\pi")


def _mixed_number(whole: Value, fraction: Value) -> Value:
    """`2\\frac{1}{2}`; where the fraction is no number, a product."""
    if fraction.number is None:
        return values.multiply(whole, fraction)
    if whole.number is None or fraction.is_inexact or fraction.number.numerator <= 0:
        raise NotPlainError
    upper = whole.number.numerator * fraction.number.denominator + fraction.number.numerator
    return values.from_number(PlainNumber(upper, fraction.number.denominator, is_decimal=False))


def _binomial(n: Value, k: Value) -> Value:
    if not (n.is_integer and k.is_integer):
        raise NotPlainError
    top, bottom = int(n.at_points[0]), int(k.at_points[0])
    if not 0 <= bottom <= top <= _MAX_BINOMIAL:
        raise NotPlainError
    return values.from_integer(comb(top, bottom))
