r"""Decide whether two answers are equal, with one line of explanation.

math-verify decides: it reads the whole answer as one LaTeX expression, after notations that it misreads are rewritten
(`answer_latex`, `latex_reader`). Two plain numbers, the most common case, are compared without it in microseconds, with
the verdict that it would give (`plain_numbers`). Text that exceeds a limit of length, depth or exponents is invalid
(`answer_limits`). Before math-verify is called, an answer to a number may have to be a number (`number_answer`); after
it, reordered words are not equal, and text that it cannot read is equal to itself (`answer_words`). There is no time
limit here, since SIGALRM works on the main thread only: `RewardPool` limits the time from outside.
"""

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from coati_rl.text import shorten
from coati_rl.types import Verdict
from rewards.math.answer_latex import to_latex
from rewards.math.answer_limits import MAX_LENGTH, exceeded_limit
from rewards.math.answer_words import has_both_cases, is_reordered_word, is_same_text
from rewards.math.extraction import formulas
from rewards.math.number_answer import is_number, states_number, states_power
from rewards.math.plain_numbers import PlainNumber, are_equal, read_plain_number

_BOX, _END_OF_BOX = r"\boxed{", "}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Hold the result of comparing an answer with the ground truth."""

    verdict: Verdict  # "invalid": the ground truth does not parse, a limit is exceeded, or the comparison failed
    detail: str  # explanation in one line


def check_answer(answer: str | None, ground_truth: str, *, must_be_number: bool = False) -> Decision:
    """Compare an extracted answer with the ground truth.

    Args:
        answer: None if the response holds no answer.
        ground_truth: LaTeX, a number or a word; `str()` of a JSON number is allowed.
        must_be_number: if the ground truth is a number, an answer that is not one is wrong, whatever its value.
    Returns: "ok" if equal, "wrong" if not or if the answer does not parse, "invalid" if that cannot be decided.
    """
    # The length is checked first: a text that is too long is neither rewritten nor cached.
    for name, text in (("ground truth", ground_truth), ("answer", answer or "")):
        if len(text) > MAX_LENGTH:
            return _not_compared(name, text, f"it is longer than {MAX_LENGTH:,} characters")
    return _check(answer, ground_truth, must_be_number)


def compare_by_math_verify(answer: str | None, ground_truth: str) -> Decision:
    """Compare as `check_answer`, by math-verify alone. Slow; without time limit for text that exceeds a limit."""
    try:
        keeps_case = _keeps_case(ground_truth, answer or "")
        gold = _parse(ground_truth, keeps_case)
        is_same = answer is not None and is_same_text(answer, ground_truth)
        # The ground truth comes first: if it does not parse, all responses with another text are invalid.
        if (gold is None and not is_same) or _is_undefined(gold):
            return Decision(verdict="invalid", detail=f"the ground truth {shorten(ground_truth)} does not parse")
        if answer is None or is_same:
            return _decision(is_same, answer, ground_truth)
        parsed = _parse(answer, keeps_case)
        if parsed is None:
            return Decision(verdict="wrong", detail=f"the answer {shorten(answer)} does not parse")
        is_equal = not is_reordered_word(answer, ground_truth) and _verify(gold, parsed)
        return _decision(is_equal, answer, ground_truth)
    except Exception as error:  # noqa: BLE001 - sympy raises anything; an undecided comparison must not become a zero
        return Decision(verdict="invalid", detail=f"the comparison failed: {type(error).__name__}: {shorten(error)}")


def is_plain_number(ground_truth: str) -> bool:
    """Return True if `ground_truth` is compared without math-verify with answers that are plain numbers."""
    return len(ground_truth) <= MAX_LENGTH and _rewrite(ground_truth).number is not None


def clear_caches() -> None:
    """Clear the caches of decisions, rewritten texts and parsed expressions."""
    for cached in (_check, _rewrite, _parse):
        cached.cache_clear()


class _Rewritten(NamedTuple):
    latex: str | None  # None for an ambiguous answer
    number: PlainNumber | None = None  # set for a plain number
    exceeded: str | None = None  # the limit that it exceeds, see `exceeded_limit`
    is_number: bool = False  # as a ground truth
    states_number: bool = False  # as an answer


@lru_cache(maxsize=4096)
def _check(answer: str | None, ground_truth: str, must_be_number: bool) -> Decision:
    gold, found = _rewrite(ground_truth), _rewrite(answer or "")
    if answer is None and gold.number:
        return _decision(False, answer, ground_truth)
    if gold.number and found.number and (is_equal := are_equal(gold.number, found.number)) is not None:
        return _decision(is_equal, answer, ground_truth)
    is_number_needed = must_be_number and answer is not None and gold.is_number
    if is_number_needed and not (_is_number_for(found, ground_truth) or is_same_text(answer or "", ground_truth)):
        detail = f"{shorten(answer or '')} is not a number, but {shorten(ground_truth)} is"
        return Decision(verdict="wrong", detail=detail)
    if gold.exceeded and answer is not None and is_same_text(answer, ground_truth):
        return _decision(True, answer, ground_truth)
    for name, text, rewritten in (("ground truth", ground_truth, gold), ("answer", answer, found)):
        if rewritten.exceeded:
            return _not_compared(name, text, rewritten.exceeded)
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
        return _Rewritten(latex, number, exceeded_limit(content), is_number=True, states_number=True)
    exceeded = exceeded_limit(content)
    return _Rewritten(latex, None, exceeded, is_number=is_number(latex), states_number=states_number(latex))


def _is_number_for(answer: _Rewritten, ground_truth: str) -> bool:
    return answer.states_number or (answer.latex is not None and states_power(answer.latex, ground_truth))


def _not_compared(name: str, text: str | None, reason: str) -> Decision:
    return Decision(verdict="invalid", detail=f"the {name} {shorten(text)} cannot be compared: {reason}")


def _decision(is_equal: bool, answer: str | None, ground_truth: str) -> Decision:
    if answer is None:
        return Decision(verdict="wrong", detail="no answer found")
    relation = "equals" if is_equal else "is not"
    detail = f"{shorten(answer)} {relation} {shorten(ground_truth)}"
    return Decision(verdict="ok" if is_equal else "wrong", detail=detail)


def _keeps_case(*texts: str) -> bool:
    """Return True if one of two texts has two variables that math-verify would read as one; sentences stay its own."""
    found = [_rewrite(text).latex or "" for text in texts]
    return all(latex.startswith(_BOX) for latex in found) and any(map(has_both_cases, found))


# sympy objects are untyped.
@lru_cache(maxsize=1024)
def _parse(answer: str, keeps_case: bool) -> Any | None:
    latex = _rewrite(answer).latex
    if latex is None:
        return None
    library = _math_verify()
    if latex.startswith(_BOX):
        # Imported at its first use, like math-verify.
        from rewards.math.latex_reader import read_latex

        return read_latex(latex, keeps_case=keeps_case)
    # LaTeX only: ExprExtractionConfig would extract any number from text that does not parse.
    config = (library.LatexExtractionConfig(boxed_match_priority=0),)
    expressions = library.parse(latex, extraction_config=config, fallback_mode="no_fallback", parsing_timeout=None)
    return expressions[0] if expressions else None


def _verify(gold: Any, answer: Any) -> bool:
    # Imported at its first use, like math-verify.
    from rewards.math.grader import verify

    return verify(gold, answer) or bool((pair := _with_one_percent_sign_less(gold, answer)) and verify(*pair))


def _with_one_percent_sign_less(gold: Any, answer: Any) -> tuple[Any, Any] | None:
    r"""Return the two without the percent sign of one: to math-verify `35\%` equals 35, but `12.5\%` not 12.5."""
    from math_verify.grader import get_pct_val

    values = get_pct_val(gold), get_pct_val(answer)
    if (values[0] is None) == (values[1] is None):
        return None
    return (gold if values[0] is None else values[0]), (answer if values[1] is None else values[1])


@lru_cache(maxsize=1)
def _math_verify() -> Any:
    # Imported at its first use: it takes 0.3 s and 50 MiB, and only the worker processes need it.
    import math_verify

    # It warns that its timeouts are disabled, which is intended.
    logging.getLogger("math_verify.parser").setLevel(logging.ERROR)
    return math_verify


def _is_undefined(expression: Any) -> bool:
    """Return True for 1/0 and 0/0, which math-verify does not compare."""
    from sympy import nan, zoo  # type: ignore[import-untyped]

    return expression is nan or expression is zoo
