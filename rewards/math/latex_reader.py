r"""Parse one LaTeX expression to a sympy expression, as math-verify does.

The steps are those of `math_verify.parse` for a text that is one `\boxed{}`, with four differences:

- The text is parsed as a whole or not at all. If the whole does not parse, math-verify searches a part that does, so
  that `1, \frac{1}{3}, or \frac{1}{2}, ,` would be 1/2.
- The parser first runs in ANTLR's SLL mode, which gives the same tree as the LL mode or an error, and is up to 20 times
  faster (for a pair (1, 2), 1 ms instead of 20 ms). After an error the LL mode decides.
- Letters and texts at the end are dropped only if they are a unit (`units`).
- Capital letters can be kept; math-verify reads them as small ones, so that `\frac{R}{r}` would be 1.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from antlr4.atn.ParserATNSimulator import ParserATNSimulator  # type: ignore[import-untyped]
from antlr4.atn.PredictionMode import PredictionMode  # type: ignore[import-untyped]
from antlr4.dfa.DFA import DFA  # type: ignore[import-untyped]
from antlr4.PredictionContext import PredictionContextCache  # type: ignore[import-untyped]
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, PSParser, _Latex2Sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
from math_verify.grader import should_treat_as_complex
from math_verify.parser import LatexExtractionConfig, get_last_eq

from rewards.math.units import ends_in_numeral, ends_in_variables, has_several_units, has_two_values

_WITH_UNITS = replace(LatexExtractionConfig().normalization_config, boxed="last")
_WITHOUT_UNITS = replace(_WITH_UNITS, units=False)


def read_latex(latex: str, *, keeps_case: bool = False) -> Any | None:
    r"""Parse `latex`, a text that is one `\boxed{}`.

    Args:
        keeps_case: capital letters are other variables than small ones.
    Returns: the expression; None if it does not parse.
    Raises: RecursionError, MemoryError if it is too deep or too large to be parsed.
    """
    if has_two_values(latex):
        return None
    text = normalize_latex(latex, config=_normalization(latex))
    config = ConversionConfig(lowercase_symbols=not keeps_case)
    expression = _parse(text, config)
    if expression is None and (last_side := get_last_eq(text)) != text:
        expression = _parse(last_side, config)  # of a chain a = b = c
    return expression


def _normalization(latex: str) -> NormalizationConfig:
    r"""Return math-verify's normalisation for `latex`; it removes a unit where nothing else would go with it."""
    has_more = ends_in_variables(latex) or ends_in_numeral(latex) or has_several_units(latex)
    return _WITHOUT_UNITS if has_more else _WITH_UNITS


def _parse(text: str, config: ConversionConfig) -> Any | None:
    is_real = not should_treat_as_complex(text)
    for parser in (_FastParser, _Latex2Sympy):
        try:
            return parser(is_real=is_real, config=config).parse(text)
        except (RecursionError, MemoryError):
            raise
        except Exception:  # noqa: BLE001 - the library raises bare exceptions for a syntax error, sympy raises anything
            continue
    return None


class _FastParser(_Latex2Sympy):  # type: ignore[misc] # untyped
    """Run latex2sympy2's parser in SLL mode, with its own tables, so that those of the LL mode do not change."""

    def create_parser(self, latex_str: str) -> Any:
        parser = super().create_parser(latex_str)
        parser._interp = ParserATNSimulator(parser, parser.atn, *_tables())
        parser._interp.predictionMode = PredictionMode.SLL
        return parser


@lru_cache(maxsize=1)
def _tables() -> tuple[list[DFA], PredictionContextCache]:
    return [DFA(state, number) for number, state in enumerate(PSParser.atn.decisionToState)], PredictionContextCache()
