r"""Decides whether two answers mean the same: two texts flow in, a verdict with one line of explanation flows out.

The verdict is math-verify's: it reads the whole answer as one LaTeX expression, never a part of it, after notations
that it misreads are rewritten (`answer_latex`, `latex_reader`). Two short cuts go round it. Plain answers, nearly all,
are compared without it, with the verdict that it would give, in microseconds (`plain_numbers`, `plain_answers`). What
would take it seconds is recognised and is invalid (`poison`).
There is no time limit here, SIGALRM works on a main thread only: `RewardPool` limits the time from outside.
"""

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from coati_rl.types import Verdict
from rewards.math.answer_latex import to_latex
from rewards.math.plain_answers import are_equal_answers
from rewards.math.plain_latex import read_plain_latex
from rewards.math.plain_numbers import are_equal, read_plain_number
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
    # First of all what is too long: no cache is to keep it.
    if max(len(answer or ""), len(ground_truth)) > MAX_LENGTH and (poisoned := _find_poison(answer, ground_truth)):
        return poisoned
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
    for cached in (_check, _whole_latex, _parse, read_plain_latex):
        cached.cache_clear()


@lru_cache(maxsize=4096)
def _check(answer: str | None, ground_truth: str) -> Decision:
    is_equal = _compare_plain(answer, ground_truth)
    if is_equal is not None:
        return _decision(is_equal, answer, ground_truth)
    return _find_poison(answer, ground_truth) or compare_by_math_verify(answer, ground_truth)


def _find_poison(answer: str | None, ground_truth: str) -> Decision | None:
    for name, text in (("ground truth", ground_truth), ("answer", answer)):
        if text is not None and (reason := find_poison(text)):
            return Decision(verdict="invalid", detail=f"the {name} {shorten(text)} cannot be compared: {reason}")
    return None


def _compare_plain(answer: str | None, ground_truth: str) -> bool | None:
    """None where it takes math-verify. A missing answer differs from a ground truth that is plain, and so defined."""
    if answer is None:
        gold = _whole_latex(ground_truth)
        return False if gold is not None and read_plain_latex(gold) else None
    number, gold_number = read_plain_number(answer.strip()), read_plain_number(ground_truth.strip())
    if number and gold_number:
        return are_equal(gold_number, number)
    latex, gold = _whole_latex(answer), _whole_latex(ground_truth)
    return None if latex is None or gold is None else are_equal_answers(gold, latex)


def _decision(is_equal: bool, answer: str | None, ground_truth: str) -> Decision:
    if answer is None:
        return Decision(verdict="wrong", detail="no answer found")
    relation = "equals" if is_equal else "is not"
    detail = f"{shorten(answer)} {relation} {shorten(ground_truth)}"
    return Decision(verdict="ok" if is_equal else "wrong", detail=detail)


@lru_cache(maxsize=1024)
def _whole_latex(answer: str) -> str | None:
    r"""The answer as LaTeX without its `\boxed{}`; None for one without a single reading, or with `$...$` in it."""
    latex = to_latex(answer)
    return latex[len(_BOX) : -len(_END_OF_BOX)] if latex and latex.startswith(_BOX) else None


# sympy objects are untyped. Cached because the G responses of a group share one ground truth.
@lru_cache(maxsize=1024)
def _parse(answer: str) -> Any | None:
    latex = to_latex(answer)
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
