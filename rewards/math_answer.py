r"""Decides whether two answers mean the same: two texts flow in, a verdict with one line of explanation flows out.

The comparison is math-verify's. This file decides what it gets to read: the whole answer as one LaTeX expression, never
a part of it, after notations that math-verify misreads are rewritten (`1\,000` is 0 to it, `3 1/2` is 2, `1e3` is 3e).
There is no time limit here, SIGALRM works on a main thread only: `RewardPool` limits the time from outside.
"""

import logging
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from coati_rl.types import Verdict
from rewards.extraction import has_balanced_braces

_SCIENTIFIC = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))[eE]([+-]?\d+)")
_MIXED_NUMBER = re.compile(r"(?<!\d)(\d+)\s+(\d+)\s*/\s*(\d+)")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:[ \u00a0\u202f]\d{3})+(?!\d)")
_LATEX_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,!;: ]|,\\!|\{,\}|~)(?=\d{3}(?!\d))")
_ADJACENT_NUMBERS = re.compile(r"\d\s+\d")
_WORDS = re.compile(r"[A-Za-z]{4,}(?:\s+[A-Za-z]+)*")
_HAS_MATH_DELIMITERS = re.compile(r"(?<!\\)\$[^$]+(?<!\\)\$|\\\(.+?\\\)|\\\[.+?\\\]|\\boxed\s*\{", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What the comparison of an answer with the ground truth came to."""

    verdict: Verdict  # "invalid": the ground truth does not parse, or the comparison itself failed
    detail: str  # one line for people


@lru_cache(maxsize=2048)
def check_answer(answer: str | None, ground_truth: str) -> Decision:
    """Compare an extracted answer with the ground truth, as math-verify understands both.

    Args:
        answer: None when the response holds no answer.
        ground_truth: LaTeX, a number or a word; `str()` of a JSON number is fine.
    Returns: "ok" when equal, "wrong" when not or when the answer does not parse, "invalid" when that cannot be decided.
    """
    gold = _parse(ground_truth)
    # The ground truth comes first: when it is broken, all responses of the group are invalid, not only the parsable.
    if gold is None or _is_undefined(gold):
        return Decision(verdict="invalid", detail=f"the ground truth {shorten(ground_truth)} does not parse")
    if answer is None:
        return Decision(verdict="wrong", detail="no answer found")
    parsed = _parse(answer)
    if parsed is None:
        return Decision(verdict="wrong", detail=f"the answer {shorten(answer)} does not parse")
    try:
        is_equal = _verify(gold, parsed)
    except Exception as error:  # noqa: BLE001 - sympy raises anything; an undecided comparison must not become a zero
        return Decision(verdict="invalid", detail=f"the comparison failed: {type(error).__name__}: {shorten(error)}")
    relation = "equals" if is_equal else "is not"
    detail = f"{shorten(answer)} {relation} {shorten(ground_truth)}"
    return Decision(verdict="ok" if is_equal else "wrong", detail=detail)


def shorten(text: object, limit: int = 80) -> str:
    """`text` on one line of at most `limit` characters."""
    line = " ".join(str(text)[: 4 * limit].split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def to_latex(answer: str) -> str | None:
    r"""Rewrite an answer so that math-verify reads it whole: usually as `\boxed{answer}`.

    Returns: None when the answer has no single reading (unbalanced braces, `1 2`, which math-verify would add up).
    """
    text = answer.strip().strip("*").strip()
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    text = _LATEX_THOUSANDS.sub("", text)
    if scientific := _SCIENTIFIC.fullmatch(text):
        text = rf"{scientific[1]} \times 10^{{{scientific[2]}}}"
    elif _WORDS.fullmatch(text):
        text = rf"\text{{{text}}}"  # unwrapped letters are a product, and "listen" would equal "silent"
    elif "\\" not in text:  # `\frac 1 2` is LaTeX; without a command, spaces between digits are a person's notation
        text = _SPACED_THOUSANDS.sub(lambda match: re.sub(r"\s", "", match[0]), text)
        text = _MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", text)
        if _ADJACENT_NUMBERS.search(text):
            return None
    if not text or not has_balanced_braces(text):
        return None
    return text if _HAS_MATH_DELIMITERS.search(text) else rf"\boxed{{{text}}}"


# sympy objects are untyped. Cached because the G responses of a group share one ground truth.
@lru_cache(maxsize=1024)
def _parse(answer: str) -> Any | None:
    latex = to_latex(answer)
    if latex is None:
        return None
    library = _math_verify()
    # LaTeX alone: the second reader, ExprExtractionConfig, picks any number out of text that does not parse.
    config = (library.LatexExtractionConfig(boxed_match_priority=0),)
    expressions = library.parse(latex, extraction_config=config, fallback_mode="no_fallback", parsing_timeout=None)
    return expressions[0] if expressions else None


def _verify(gold: Any, answer: Any) -> bool:
    return bool(_math_verify().verify(gold, answer, timeout_seconds=None, raise_on_error=True))


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
