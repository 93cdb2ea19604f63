r"""Decide whether two answers mean the same, with one line of explanation.

The verdict is math-verify's: it reads the whole answer as one LaTeX expression, never a part of it, after notations
that it misreads are rewritten (`answer_latex`, `latex_reader`). Two plain numbers, which most pairs are, are compared
without it, with the verdict that it would give, in microseconds (`plain_numbers`). What is too long, too deep or too
large to be read is invalid (`poison`).
There is no time limit here, SIGALRM works on a main thread only: `RewardPool` limits the time from outside.
"""

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from coati_rl.types import Verdict
from rewards.math.answer_latex import to_latex
from rewards.math.plain_numbers import PlainNumber, are_equal, read_plain_number
from rewards.math.poison import MAX_LENGTH, find_poison
from rewards.text import shorten

_BOX, _END_OF_BOX = r"\boxed{", "}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What the comparison of an answer with the ground truth came to."""

    verdict: Verdict  # "invalid": the ground truth does not parse, one of the two is poison, or the comparison failed
    detail: str  # one line for people


def check_answer(answer: str | None, ground_truth: str) -> Decision:
    """Compare an extracted answer with the ground truth, as math-verify understands both.

    Args:
        answer: None when the response holds no answer.
        ground_truth: LaTeX, a number or a word; `str()` of a JSON number is fine.
    Returns: "ok" when equal, "wrong" when not or when the answer does not parse, "invalid" when that cannot be decided.
    """
    # First of all what is too long: it is not even rewritten, and no cache is to keep it.
    for name, text in (("ground truth", ground_truth), ("answer", answer or "")):
        if len(text) > MAX_LENGTH:
            return _poisoned(name, text, f"it is longer than {MAX_LENGTH:,} characters")
    return _check(answer, ground_truth)


def compare_by_math_verify(answer: str | None, ground_truth: str) -> Decision:
    """As `check_answer`, without the short cuts. Slow, and endless where the text is poison."""
    try:
        gold = _parse(ground_truth)
        # The ground truth comes first: when it is broken, all responses of the group are invalid.
        if gold is None or _is_undefined(gold):
            return Decision(verdict="invalid", detail=f"the ground truth {shorten(ground_truth)} does not parse")
        parsed = None if answer is None else _parse(answer)
        if answer is not None and parsed is None:
            return Decision(verdict="wrong", detail=f"the answer {shorten(answer)} does not parse")
        return _decision(answer is not None and _verify(gold, parsed), answer, ground_truth)
    except Exception as error:  # noqa: BLE001 - sympy raises anything; an undecided comparison must not become a zero
        return Decision(verdict="invalid", detail=f"the comparison failed: {type(error).__name__}: {shorten(error)}")


def clear_caches() -> None:
    """Forget all decisions and readings."""
    for cached in (_check, _rewrite, _parse):
        cached.cache_clear()


class _Rewritten(NamedTuple):
    latex: str | None  # None for an answer without a single reading
    number: PlainNumber | None = None  # what it is, if it is a plain number
    poison: str | None = None  # why math-verify is not to read it


@lru_cache(maxsize=4096)
def _check(answer: str | None, ground_truth: str) -> Decision:
    gold, found = _rewrite(ground_truth), _rewrite(answer or "")
    if answer is None and gold.number:
        return _decision(False, answer, ground_truth)
    if gold.number and found.number and (is_equal := are_equal(gold.number, found.number)) is not None:
        return _decision(is_equal, answer, ground_truth)
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
    return _Rewritten(latex, read_plain_number(content), find_poison(content))


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
    return bool(_math_verify().verify(gold, answer, **options))


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
