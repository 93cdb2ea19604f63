r"""Reads plain LaTeX without a computer algebra system: the text of an answer flows in, what it says flows out.

Plain is what has one reading, to people and to math-verify: integers, decimals, fractions, roots, powers, `\pi`, sums
and products of them and of letters; tuples, intervals, sets and matrices of these, relations between them, a unit after
them; a word. Everything else, and all in which math-verify surprises (the t of `5t` stands for tons), is not read here.
"""

import re
from functools import lru_cache
from typing import Literal, NamedTuple

from rewards.math.plain_expression import FUNCTIONS, ExpressionReader, NotPlainError
from rewards.math.plain_numbers import read_plain_number
from rewards.math.sampled_value import INFINITY, LETTERS, MINUS_INFINITY, UndefinedValueError, Value, from_number

_MAX_LENGTH = 200
_LETTERS_AT_END = "iknpquvwxyz"  # another letter at the end of the text may be a unit to math-verify

_SPELLINGS = (
    (re.compile(r"\\(?:left|right)(?=[()\[\]]|\\[{}])"), ""),
    (re.compile(r"\\[dt]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\frac ?([0-9]) ?([0-9])(?![0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\sqrt ?([0-9])(?![0-9])"), r"\\sqrt{\1}"),
    (re.compile(r"\\log ?_ ?([0-9])(?![0-9])"), r"\\log_{\1}"),
    (re.compile(r"\^ ?([0-9a-z])(?![0-9])"), r"^{\1}"),
    (re.compile(r"\\(le|ge)q(?![a-zA-Z])"), r"\\\1"),
    (re.compile(r"\\times(?![a-zA-Z])"), r"\\cdot"),
    (re.compile(r"\\(begin|end)\{bmatrix\}"), r"\\\1{pmatrix}"),
    (re.compile(r"(?<=[^\s\\])\s*\\text ?\{[A-Za-z ]+\}(?:\^\{?[0-9]\}?)?$"), ""),  # a unit
    (re.compile(r"(?<=[0-9])\^\{? ?\\circ ?\}?$"), ""),
    (re.compile(r"(?<=[0-9]) ?\\?%$"), r"\\%"),
)
_TOKEN = re.compile(
    r"(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,15})?(?![0-9.])"
    rf"|[{LETTERS}]|e(?=\^)"
    r"|\\(?:frac|sqrt|pi|infty|cdot|binom|cup|le|ge|sin|cos|tan|ln|log)(?![a-zA-Z])|\\(?:begin|end)\{pmatrix\}|\\\\|\\[{}%]"
    r"|[-+^_!()\[\]{},=<>&]"
)
# A comma before three digits may separate thousands. math-verify takes these words for more than words.
_NOT_PLAIN = re.compile(
    r"[0-9],[0-9]{3}(?![0-9])|(?<!_)[0-9] +[0-9]|(?<!\\)(?:\b(?:and|or|pi|gamma|percent|percentage|pct)\b|inf|sqrt)"
)
_WORD = re.compile(r"\(?([A-DFGHJ-Z])\)?|\\text ?\{ ?\(?([A-Za-z]+(?: [A-Za-z]+)*)\)? ?\}")
_RELATIONS = ("=", "<", ">", r"\le", r"\ge")


class Reading(NamedTuple):
    """What a text says. Two texts with the same tokens are the same expression to math-verify, and a defined one."""

    tokens: tuple[str, ...]
    kind: Literal["word", "number", "percentage", "set", "brackets", "union", "matrix", "relation"]
    form: str = ""  # of brackets and unions "[)" or "()[]"; of a matrix "2 x 3"; of a relation "x=", or "" for another
    parts: tuple[Value, ...] = ()  # of a relation x = 3, the 3; of any other relation, none


@lru_cache(maxsize=2048)
def read_plain_latex(text: str) -> Reading | None:
    """What the text says; None when it is not plain, or not defined."""
    if len(text) > _MAX_LENGTH:
        return None
    if number := read_plain_number(text):
        return Reading((text,), "number", parts=(from_number(number),))
    if _NOT_PLAIN.search(text.lower()):
        return None
    if word := _WORD.fullmatch(text):
        name = (word[1] or word[2]).replace(" ", "").lower()
        return Reading((name,), "word") if name not in ("e", "i") else None
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    tokens = tuple(_TOKEN.findall(text))
    if not tokens or "".join(tokens) != text.replace(" ", "") or not _are_letters_plain(tokens):
        return None
    try:
        return _AnswerReader(tokens).answer()
    except (NotPlainError, UndefinedValueError):
        return None


def _are_letters_plain(tokens: tuple[str, ...]) -> bool:
    if "i" in tokens and any(token.isalpha() and token != "i" for token in tokens):
        return False  # math-verify takes letters for real numbers, unless there is an i among them
    for token in reversed(tokens):
        if not token.isalpha():
            break
        if token not in _LETTERS_AT_END:
            return False
    return True


class _AnswerReader(ExpressionReader):
    """Reads a whole answer. Raises: NotPlainError, UndefinedValueError."""

    def answer(self) -> Reading:
        """What the tokens say."""
        if r"\cup" in self._tokens:
            return self._union()
        if self.next == r"\begin{pmatrix}":
            return self._matrix()
        if any(relation in self._tokens for relation in _RELATIONS):
            return self._relation()
        if self.next in ("(", "["):
            try:
                form, parts = self._brackets()
                return self._whole("brackets", form, parts)
            except NotPlainError:
                self.rewind()  # (x - 1)(x + 1)
        if self.accept(r"\{"):
            parts = self._elements()
            self.expect(r"\}")
            return self._whole("set", "", parts)
        parts = self._elements()
        if len(parts) == 1 and parts[0].number is not None and self.accept(r"\%"):
            if not self._tokens[-3].isdigit():  # before the last token and the end
                raise NotPlainError
            return self._whole("percentage", "", parts)
        return self._whole("number" if len(parts) == 1 else "set", "", parts)

    def _whole(self, kind: str, form: str, parts: tuple[Value, ...]) -> Reading:
        # An interval from a logarithm to a number fails in math-verify; who knows what else.
        if self.next or (kind != "number" and not FUNCTIONS.isdisjoint(self._tokens)):
            raise NotPlainError
        return Reading(self._tokens[:-1], kind, form, parts)  # type: ignore[arg-type]

    def _union(self) -> Reading:
        form, parts = self._brackets()
        while self.accept(r"\cup"):
            brackets, ends = self._brackets()
            form, parts = form + brackets, parts + ends
        return self._whole("union", form, parts)

    def _matrix(self) -> Reading:
        self.expect(r"\begin{pmatrix}")
        rows = [[self.expression()]]
        while separator := self.accept("&", r"\\"):
            if separator == r"\\":
                rows.append([])
            rows[-1].append(self.expression())
        self.expect(r"\end{pmatrix}")
        if len({len(row) for row in rows}) != 1:
            raise NotPlainError
        return self._whole("matrix", f"{len(rows)} x {len(rows[0])}", tuple(cell for row in rows for cell in row))

    def _relation(self) -> Reading:
        left = self.expression()
        relation = self.expect(*_RELATIONS)
        is_assignment = left.is_letter and self._tokens[0] not in self._tokens[2:]
        right = self.expression()
        if is_assignment and not self.next:
            return self._whole("relation", self._tokens[0] + relation, (right,))
        while self.accept(*_RELATIONS):
            self.expression()
        return self._whole("relation", "", ())

    def _brackets(self) -> tuple[str, tuple[Value, ...]]:
        opening = self.expect("(", "[")
        parts = self._elements()
        form = opening + self.expect(")", "]")
        if len(parts) < 2 or (len(parts) > 2 and form != "()"):
            raise NotPlainError
        # An empty interval to math-verify, or one with an end that is no real number.
        has_letter = any(part.has_letter for part in parts)
        is_infinite = any(part.is_infinite for part in parts)
        if (is_infinite and (has_letter or parts[0] == INFINITY or parts[-1] == MINUS_INFINITY)) or any(
            part.has_letter and not part.is_exact for part in parts
        ):
            raise NotPlainError
        return form, parts

    def _elements(self) -> tuple[Value, ...]:
        elements = [self._element()]
        while self.accept(","):
            elements.append(self._element())
        return tuple(elements)

    def _element(self) -> Value:
        if self.next == "-" and self._tokens[self._position + 1] == r"\infty":
            self.take()
            self.take()
            return MINUS_INFINITY
        return INFINITY if self.accept(r"\infty") else self.expression()
