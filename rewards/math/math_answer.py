r"""Decide whether two answers mean the same, with one line of explanation.

The verdict is math-verify's: it reads the whole answer as one LaTeX expression, never a part of it, after notations
that it misreads are rewritten (`answer_latex`, `latex_reader`). Two plain numbers, which most pairs are, are compared
without it, with the verdict that it would give, in microseconds (`plain_numbers`). What is too long, too deep or too
large to be read is invalid (`poison`). Before math-verify is asked, an answer to a number may have to be a number
(`number_answer`); after it, reordered words are not equal, and what it cannot read is equal to itself (`answer_words`).
There is no time limit here, SIGALRM works on a main thread only: `RewardPool` limits the time from outside.
"""

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from coati_rl.text import shorten
from coati_rl.types import Verdict
from rewards.math.answer_latex import to_latex
from rewards.math.answer_limits import MAX_LENGTH, find_poison
from rewards.math.answer_words import is_reordered_word, is_same_text
from rewards.math.extraction import formulas
from rewards.math.number_answer import is_number, states_number, states_power
from rewards.math.plain_numbers import PlainNumber, are_equal, read_plain_number

_BOX, _END_OF_BOX = r"\boxed{", "}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Describe what the comparison of an answer with the ground truth came to."""

    verdict: Verdict  # "invalid": the ground truth does not parse, one of the two is poison, or the comparison failed
    detail: str  # one line for people


def check_answer(answer: str | None, ground_truth: str, *, must_be_number: bool = False) -> Decision:
    """Compare an extracted answer with the ground truth, as math-verify understands both.

    Args:
        answer: None when the response holds no answer.
        ground_truth: LaTeX, a number or a word; `str()` of a JSON number is fine.
        must_be_number: where the ground truth is a number, any other answer is wrong, whatever its value.
    Returns: "ok" when equal, "wrong" when not or when the answer does not parse, "invalid" when that cannot be decided.
    """
    # First of all what is too long: it is not even rewritten, and no cache is to keep it.
    for name, text in (("ground truth", ground_truth), ("answer", answer or "")):
        if len(text) > MAX_LENGTH:
            return _poisoned(name, text, f"it is longer than {MAX_LENGTH:,} characters")
    return _check(answer, ground_truth, must_be_number)


def compare_by_math_verify(answer: str | None, ground_truth: str) -> Decision:
    """As `check_answer`, without the short cuts. Slow, and endless where the text is poison."""
    try:
        gold = _parse(ground_truth)
        is_same = answer is not None and is_same_text(answer, ground_truth)
        # The ground truth comes first: when it is broken, all responses of the group are invalid but those that are it.
        if (gold is None and not is_same) or _is_undefined(gold):
            return Decision(verdict="invalid", detail=f"the ground truth {shorten(ground_truth)} does not parse")
        if answer is None or is_same:
            return _decision(is_same, answer, ground_truth)
        parsed = _parse(answer)
        if parsed is None:
            return Decision(verdict="wrong", detail=f"the answer {shorten(answer)} does not parse")
        is_equal = not is_reordered_word(answer, ground_truth) and _verify(gold, parsed)
        return _decision(is_equal, answer, ground_truth)
    except Exception as error:  # noqa: BLE001 - sympy raises anything; an undecided comparison must not become a zero
        return Decision(verdict="invalid", detail=f"the comparison failed: {type(error).__name__}: {shorten(error)}")


def is_plain_number(ground_truth: str) -> bool:
    """Tell whether `ground_truth` is compared without math-verify, if the answer is a plain number too."""
    return len(ground_truth) <= MAX_LENGTH and _rewrite(ground_truth).number is not None


def clear_caches() -> None:
    """Forget all decisions and readings."""
    for cached in (_check, _rewrite, _parse):
        cached.cache_clear()


class _Rewritten(NamedTuple):
    latex: str | None  # None for an answer without a single reading
    number: PlainNumber | None = None  # what it is, if it is a plain number
    poison: str | None = None  # why math-verify is not to read it
    is_number: bool = False  # as a ground truth
    states_number: bool = False  # as an answer


@lru_cache(maxsize=4096)
def _check(answer: str | None, ground_truth: str, must_be_number: bool) -> Decision:
    gold, found = _rewrite(ground_truth), _rewrite(answer or "")
    if answer is None and gold.number:
        return _decision(False, answer, ground_truth)
    if gold.number and found.number and (is_equal := are_equal(gold.number, found.number)) is not None:
        return _decision(is_equal, answer, ground_truth)
    if must_be_number and answer is not None and gold.is_number and not _is_number_for(found, ground_truth):
        detail = f"{shorten(answer)} is no number, and {shorten(ground_truth)} is one"
        return Decision(verdict="wrong", detail=detail)
    if gold.poison and answer is not None and is_same_text(answer, ground_truth):
        return _decision(True, answer, ground_truth)
    for name, text, rewritten in (("ground truth", ground_truth, gold), ("answer", answer, found)):
        if rewritten.poison:
            return _poisoned(name, text, rewritten.poison)
    return compare_by_math_verify(answer, ground_truth)


# Cached, as _parse is, because the G responses of a group share one ground truth.
@lru_cache(maxsize=1024)
def _rewrite(text: str) -> _Rewritten:
    latex = to_latex(text)
    if latex is None:
        return _Rewritten(None)
    content = latex[len(_BOX) : -len(_END_OF_BOX)] if latex.startswith(_BOX) else latex
    if content is latex and len(formula := formulas(latex)) == 1:  # The answer is $5$
        content, latex = formula[0], f"{_BOX}{formula[0]}{_END_OF_BOX}"
    if number := read_plain_number(content):
        return _Rewritten(latex, number, find_poison(content), is_number=True, states_number=True)
    poison = find_poison(content)
    return _Rewritten(latex, None, poison, is_number=is_number(latex), states_number=states_number(latex))


def _is_number_for(answer: _Rewritten, ground_truth: str) -> bool:
    return answer.states_number or (answer.latex is not None and states_power(answer.latex, ground_truth))


def _poisoned(name: str, text: str | None, reason: str) -> Decision:
    return Decision(verdict="invalid", detail=f"the {name} {shorten(text)} cannot be compared: {reason}")


def _decision(is_equal: bool, answer: str | None, ground_truth: str) -> Decision:
    if answer is None:
        return Decision(verdict="wrong", detail="no answer found")
    relation = "equals" if is_equal else "is not"
    detail = f"{shorten(answer)} {relation} {shorten(ground_truth)}"
    return Decision(verdict="ok" if is_equal else "wrong", detail=detail)


# sympy objects are untyped.
@lru_cache(maxsize=1024)
def _parse(answer: str) -> Any | None:
    latex = _rewrite(answer).latex
    if latex is None:
        return None
    library = _math_verify()
    if latex.startswith(_BOX):
        # Imported at its first use, as math-verify is.
        from rewards.math.latex_reader import read_latex

        return read_latex(latex)
    # LaTeX alone: the second reader, ExprExtractionConfig, picks any number out of text that does not parse.
    config = (library.LatexExtractionConfig(boxed_match_priority=0),)
    expressions = library.parse(latex, extraction_config=config, fallback_mode="no_fallback", parsing_timeout=None)
    return expressions[0] if expressions else None


def _verify(gold: Any, answer: Any) -> bool:
    # Set against relation in both directions: x <= 3 is (-oo, 3], whichever of the two is the ground truth.
    options = {"timeout_seconds": None, "raise_on_error": True, "allow_set_relation_comp": True}
    verify = _math_verify().verify
    return bool(verify(gold, answer, **options)) or bool(
        (pair := _with_one_percent_sign_less(gold, answer)) and verify(*pair, **options)
    )


def _with_one_percent_sign_less(gold: Any, answer: Any) -> tuple[Any, Any] | None:
    r"""The two, if one is a percentage: math-verify lets `35\%` be 35, and not `12.5\%` 12.5."""
    from math_verify.grader import get_pct_val

    values = get_pct_val(gold), get_pct_val(answer)
    if (values[0] is None) == (values[1] is None):
        return None
    return (gold if values[0] is None else values[0]), (answer if values[1] is None else values[1])


@lru_cache(maxsize=1)
def _math_verify() -> Any:
    # Imported at its first use: it costs 0.3 s and 50 MiB, and only the worker processes need it.
    import math_verify

    for module in ("math_verify.parser", "math_verify.grader"):
        # It warns that its timeouts are off: they are, on purpose.
        logging.getLogger(module).setLevel(logging.ERROR)
    return math_verify


def _is_undefined(expression: Any) -> bool:
    """True for 1/0 and 0/0, which math-verify compares with nothing."""
    from sympy import nan, zoo  # type: ignore[import-untyped]

    return expression is nan or expression is zoo
