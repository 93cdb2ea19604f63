r"""Recognises poison: a text flows in, the reason why math-verify would take seconds over it flows out, or nothing.

Poison is what models write by accident: `9^{9^{9^9}}`, `20!!`, two thousand brackets. It is recognised in one pass
over the text that computes nothing: the sizes of numbers are followed as logarithms, letters stop it, and what cannot
be read is stepped over. The limits are several times what answers need (`100!`, `2^{1000}`, `(x+1)^{100}` pass); they
stand where math-verify begins to take half a second. Its other bad cases cannot be told from the text (one integral
takes it 0.1 s, another never ends); they are left to the time limit.
"""

import re
from dataclasses import dataclass, field
from math import comb, inf, log10
from typing import NamedTuple

MAX_LENGTH = 1000  # characters
_MAX_DEPTH = 10  # brackets in brackets
_MAX_COST_MS = 800
_MAX_DIGITS = 500_000  # of one exact number; 100000! has 456,574
_MAX_FACTORIAL = 100_000
_MAX_CHOSEN = 20_000  # k or n - k of a binomial coefficient, the smaller
_MAX_SUMMANDS = 10_000  # the upper bound of \sum and \prod
_MAX_HEIGHT = 5  # of a tower of powers
_MAX_DEGREE = 1_000  # of a power of a sum with letters or roots
_MAX_EXPANSION = 10_000  # terms of all such powers, multiplied out
_MAX_DETERMINANT = 16  # entries, of the largest that is computed with letters in it

# Milliseconds that math-verify takes for a token where there are many of its kind, on a core of 2 GHz; of others 2.
_COST_MS = {"^": 20, "_": 20, r"\cup": 10, r"\cap": 10, "=": 5, "<": 5, ">": 5, r"\sqrt": 6, "(": 3, "[": 3, "|": 20}
_COST_MS |= {
    rf"\{name}": 100 for name in ("sin", "cos", "tan", "cot", "sec", "csc", "ln", "log", "arcsin", "arccos", "arctan")
}

_LARGE_MATRIX = re.compile(r"\\operatorname\s?\{(?:eye|zeros|ones)\}\s?\([0-9, ]{0,20}?[0-9]{3}")
_TOKEN = re.compile(r"[0-9]+(?:\.[0-9]+)?|\\[a-zA-Z]+|\\.|[a-zA-Z]+|[-+*/^_!=<>&|,;(){}\[\]]", re.DOTALL)
_OPENING, _CLOSING = frozenset(("(", "[", "{", r"\{")), frozenset((")", "]", "}", r"\}"))
_BETWEEN_TERMS = frozenset(("+", "-", ",", ";", "=", "<", ">", "&", r"\\", r"\le", r"\ge", r"\leq", r"\geq"))
_ROLES = {  # of what follows a token
    "^": ("exponent",),
    "_": ("subscript",),
    "/": ("divisor",),
    r"\div": ("divisor",),
    r"\frac": ("numerator", "denominator"),
    r"\dfrac": ("numerator", "denominator"),
    r"\tfrac": ("numerator", "denominator"),
    r"\binom": ("n", "k"),
    r"\sqrt": ("root",),
}


class _PoisonError(Exception):
    """Says why."""


class _Size(NamedTuple):
    """About how large a number is, and how long its exact form."""

    log: float = 0.0  # of its magnitude, to base 10
    digits: float = 0.0
    is_number: bool = True  # no letter, no root in it
    num_terms: int = 1
    height: int = 0  # of the tower of powers

    @property
    def value(self) -> float:
        return 10.0**self.log if self.log < 300 else inf


_NOTHING, _ONE, _LETTER = _Size(log=-inf, num_terms=0), _Size(), _Size(log=1.0, is_number=False)
_BOUNDED_OPERATOR = _Size(num_terms=0, is_number=False)  # the upper bound of a sum comes as its exponent


@dataclass(slots=True)
class _Group:
    """What stands between two brackets, up to the position."""

    total: _Size = _NOTHING
    product: _Size = _ONE
    last: _Size | None = None  # the factor that an exponent or a factorial would belong to
    upper: _Size = _ONE  # the numerator, or n of a binomial coefficient, until what belongs to it is read
    roles: list[str] = field(default_factory=list)  # of the next factors


def find_poison(text: str) -> str | None:
    """Why math-verify would take seconds over `text`, for people; None when nothing speaks for that."""
    if len(text) > MAX_LENGTH:
        return f"it is longer than {MAX_LENGTH:,} characters"
    tokens = _TOKEN.findall(text)
    cost_ms = sum(_COST_MS.get(token, 2) for token in tokens)
    if cost_ms > _MAX_COST_MS:
        return f"it has too many parts ({len(tokens)})"
    if _LARGE_MATRIX.search(text):
        return "it makes a matrix of more than 99 rows"
    if "vmatrix" in text and 1 + tokens.count("&") + tokens.count(r"\\") > _MAX_DETERMINANT:
        return f"it is a determinant with more than {_MAX_DETERMINANT} entries"
    try:
        _Scanner().scan(tokens)
    except _PoisonError as reason:
        return str(reason)
    return None


class _Scanner:
    def __init__(self) -> None:
        self._groups = [_Group()]
        self._expansion = 1

    def scan(self, tokens: list[str]) -> None:
        """Raises: _PoisonError."""
        for token in tokens:
            group = self._groups[-1]
            if token[0].isdigit():
                self._add(_size_of(token))
            elif token in _OPENING:
                if token == "[" and group.roles[:1] == ["root"]:
                    group.roles.insert(0, "index")
                self._groups.append(_Group())
                if len(self._groups) > _MAX_DEPTH + 1:
                    raise _PoisonError(f"it is nested more than {_MAX_DEPTH} deep")
            elif token in _CLOSING:
                self._close()
            elif token in _ROLES:
                group.roles[:0] = _ROLES[token]
            elif token == "!":
                group.last = _factorial(group.last or _ONE)
            elif token in _BETWEEN_TERMS:
                _end_term(group)
            elif token in (r"\sum", r"\prod"):
                self._add(_BOUNDED_OPERATOR)
            elif token.isalpha() or token == r"\pi":
                self._add(_LETTER)

    def _close(self) -> None:
        group = self._groups.pop()
        _end_term(group)
        if self._groups:
            self._add(group.total)
        else:
            self._groups.append(_Group())  # a closing bracket too many

    def _add(self, size: _Size) -> None:
        group = self._groups[-1]
        role = group.roles.pop(0) if group.roles else "factor"
        if role in ("numerator", "n"):
            group.upper = size
        elif role == "exponent":
            group.last = self._power(group.last or _ONE, size)
        elif role not in ("subscript", "index"):
            _end_factor(group)
            if role == "denominator":
                size = _product(group.upper, _inverse(size))
            elif role == "divisor":
                size = _inverse(size)
            elif role == "k":
                size = _binomial(group.upper, size)
            elif role == "root":
                size = size._replace(log=size.log / 2, is_number=False, num_terms=1)
            group.last = size

    def _power(self, base: _Size, exponent: _Size) -> _Size:
        if base is _BOUNDED_OPERATOR:
            if exponent.is_number and exponent.value > _MAX_SUMMANDS:
                raise _PoisonError(f"it has a sum or a product of more than {_MAX_SUMMANDS:,} terms")
            return _ONE
        if (height := 1 + max(base.height, exponent.height)) > _MAX_HEIGHT:
            raise _PoisonError(f"it has a tower of more than {_MAX_HEIGHT} powers")
        if not exponent.is_number:
            return _LETTER._replace(height=height)
        n = exponent.value
        if base.is_number:
            if (digits := base.digits * max(n, 1.0)) > _MAX_DIGITS:
                raise _PoisonError(f"it has a number of more than {_MAX_DIGITS:,} digits")
            return _Size(log=base.log * n, digits=digits, height=height)
        if base.num_terms > 1:
            if n > _MAX_DEGREE:
                raise _PoisonError(f"it has a power of a sum with an exponent over {_MAX_DEGREE:,}")
            self._expansion *= comb(int(n) + base.num_terms - 1, base.num_terms - 1)
            if self._expansion > _MAX_EXPANSION:
                raise _PoisonError(f"multiplied out it has more than {_MAX_EXPANSION:,} terms")
        return _LETTER._replace(height=height)


def _size_of(number: str) -> _Size:
    whole, _, decimals = number.partition(".")
    whole = whole.lstrip("0")
    log = len(whole) + log10(float(f"0.{whole[:15]}")) if whole else 0.0
    return _Size(log=log, digits=0.0 if decimals else log)  # a decimal is a binary number, which does not grow


def _end_factor(group: _Group) -> None:
    if group.last is not None:
        group.product = _product(group.product, group.last)
        group.last = None


def _end_term(group: _Group) -> None:
    _end_factor(group)
    group.total = _sum(group.total, group.product)
    group.product = _ONE
    group.roles.clear()


def _sum(x: _Size, y: _Size) -> _Size:
    larger = max(x.log, y.log)
    log = larger + log10(10 ** (x.log - larger) + 10 ** (y.log - larger)) if larger > -inf else larger
    is_number, height = x.is_number and y.is_number, max(x.height, y.height)
    return _Size(log, x.digits + y.digits, is_number, x.num_terms + 1, height)


def _product(x: _Size, y: _Size) -> _Size:
    is_number, height = x.is_number and y.is_number, max(x.height, y.height)
    return _Size(x.log + y.log, x.digits + y.digits, is_number, max(x.num_terms, y.num_terms), height)


def _inverse(x: _Size) -> _Size:
    return x._replace(log=-x.log)


def _factorial(n: _Size) -> _Size:
    if not n.is_number:
        return _LETTER
    if n.value > _MAX_FACTORIAL:
        raise _PoisonError(f"it has a factorial of more than {_MAX_FACTORIAL:,}")
    digits = n.value * max(n.log - 0.43, 0.0) + 1
    return _Size(log=digits, digits=digits)


def _binomial(n: _Size, k: _Size) -> _Size:
    if not (n.is_number and k.is_number):
        return _LETTER
    if min(k.value, n.value - k.value) > _MAX_CHOSEN:
        raise _PoisonError(f"it has a binomial coefficient that takes more than {_MAX_CHOSEN:,} factors")
    digits = max(n.log, 0.0) * max(min(k.value, n.value), 1.0)
    return _Size(log=digits, digits=digits)
