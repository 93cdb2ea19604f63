r"""Rewrite common notations of answers as LaTeX that math-verify reads completely and correctly.

math-verify misreads or refuses many common notations: it reads `1\,000` as 0, `3 1/2` as 2, `1e3` as 3e, `12 eggs` as a
product of letters, `3:00` as a division by zero. Each rule rewrites one notation; its test cases are in
tests/unit/rewards/test_math_answer_table.py. All rules are linear in the length of the text.
"""

import re

from rewards.math.degrees import to_radians
from rewards.math.extraction import adjacent_formulas, has_balanced_braces
from rewards.math.plus_minus import expand_plus_minus
from rewards.math.symbols import without_symbols
from rewards.math.units import NUMERALS

_ROOT = re.compile(r"\N{SQUARE ROOT}\s*(?:(\d+|[a-z])|\(([^()]*)\))")
_CURRENCY = r"\\(?:(?:text|math)dollar|pounds|euro)(?![A-Za-z])|[€£¥₹]"
_CODE = r"(?:USD|EUR|GBP|INR)"
_LEADING = re.compile(
    rf"(?:=|\\approx|~)\s*|\+\s*|(?:{_CURRENCY}|\\text\s*\{{\s*\\?\$\s*\}}|(?:{_CODE}|Rs\.?)\s)\s*(?=[\d.])"
)
_TAIL = 20  # characters of a text's end in which a currency is looked for
_CURRENCY_LAST = re.compile(rf"(?<=\d)(?:(?:\\[,;: ]|~|\s)*(?:\\\$|{_CURRENCY}|¢|(?<!\\)\$)|\s+{_CODE})$")
_SPACE_AFTER_MINUS = re.compile(r"-\s+")
_DELIMITERS = (
    *((r"\boxed{", "}"), ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")),
    *((rf"\{command}{{", "}") for command in ("boldsymbol", "bm", "pmb", "mathbf", "mathsf", "mathtt", "mathnormal")),
    *((rf"\{command}{{", "}") for command in ("textbf", "textsf", "texttt", "textup", "textsc", "textsl")),
    *((rf"\{command}{{", "}") for command in ("emph", "underline")),
)
_LOOK = re.compile(
    r"\\(?:(?:bf|textstyle|normalsize|small|large|Large|LARGE|huge|Huge)(?![A-Za-z])|(?:text)?color\s*\{[A-Za-z]+\})\s*"
)
_BOLD = re.compile(r"\\(?:boldsymbol|bm|pmb|mathnormal)(?![A-Za-z])\s*")
_TEXT_FONT = re.compile(r"\\(?:mathsf|mathtt|textsf|texttt|textup|textsc|textsl|emph)(?=\s*\{)")
_CHOICE = re.compile(r"([A-Za-z])\s*[):]")
_SEPARATOR = re.compile("[,;]")
_HAS_MATH_DELIMITERS = re.compile(r"(?<!\\)\$[^$]+(?<!\\)\$|\\\(.+?\\\)|\\\[.+?\\\]|\\boxed\s*\{", re.DOTALL)

_MANTISSA = r"(-?)(\d{1,15})(?:\.(\d{0,15}))?"
_E_NOTATION = re.compile(rf"{_MANTISSA}[eE]([+-]?\d{{1,9}})")
_TIMES_POWER_OF_TEN = re.compile(
    rf"{_MANTISSA}\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:(\d)|\{{\s*([+-]?\d{{1,9}})\s*\}})"
)
_SCALED = re.compile(
    rf"(?:\\?\$\s*)?{_MANTISSA}(?:\\[,;: ]|~|\s)*(?:\\text\s*\{{\s*)?(thousand|million|billion)\b(?:\s+dollars)?\s*\}}?"
)
_SCALES = {"thousand": "3", "million": "6", "billion": "9"}
_POINT_FIRST = re.compile(r"^(-?)(?=\.\d)")
_LARGEST_SHIFT = 40  # decimal places by which a point is moved
_MIXED_NUMBER = re.compile(r"(?<!\d)(\d+)\s+(\d+)\s*/\s*(\d+)")
_REPEATING = re.compile(r"(-?)(\d{1,9})\.(\d{0,9})\\overline\s*\{(\d{1,9})\}")
_ORDINAL = re.compile(r"(\d+)(?:st|nd|rd|th)")
_FULL_HOUR = re.compile(r"(\d{1,2}:00)(?:\s*(?:\\text\s*\{\s*)?[AaPp]\.?\s?[Mm]\.?\s*\}?)?")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")

_THOUSANDS = r"\d{1,3}(?:,\d{3})+"
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:[ \u00a0\u202f]\d{3})+(?!\d)")
_LATEX_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,!;: ]|,\\!|\{,\}|~)(?=\d{3}(?!\d))")
_THOUSANDS_IN_BRACES = re.compile(rf"(?<=\{{){_THOUSANDS}(?=\}})")
_THOUSANDS_IN_FRACTION = re.compile(rf"-?(?:{_THOUSANDS}|\d+)\s*/\s*(?:{_THOUSANDS}|\d+)")
_ADJACENT_NUMBERS = re.compile(r"\d\s+\d")
# math-verify drops a text at the end as a unit, and reads 2+3\mathrm{i} as 5.
_UPRIGHT_CONSTANT = re.compile(
    r"(?P<command>\\[A-Za-z]+)?\s*\\(?:mathrm|mathit|textrm|text|rm)\s*\{\s*(?P<letter>[ie])\s*\}"
)
# math-verify drops primes, so that f'(x) = 2x would be f(x) = 2x.
_PRIME = r"\\prime|'"
_PRIMED = re.compile(
    r"(?P<name>\\(?!circ|degree|right|prime)[A-Za-z]+|(?<![A-Za-z\\][A-Za-z])[A-Za-z])"
    r"(?P<primes>'+(?![a-z]{2})|\s*\^\s*(?:\\prime(?![A-Za-z])|\{\s*(?:(?:\\prime|')\s*)+\}))(?!\s*_)"
)
# math-verify computes the derivative of one variable with respect to another as 0, and reads dy/dx as y/x.
_D = r"\s*(?:d|\\partial(?![A-Za-z])|\\mathrm\s*\{\s*d\s*\})\s*([A-Za-z])\s*"
_RATE = re.compile(rf"\\[dt]?frac\s*\{{{_D}\}}\s*\{{{_D}\}}|(?<![A-Za-z\\])d([A-Za-z])/d([A-Za-z])(?![A-Za-z])")
# Without the exponent of a unit a number stands alone; one letter is a variable, also in m^2.
_SQUARED_UNIT = re.compile(
    r"(?:(?<=[\d}])\s*(?:cm|mm|ft)|\s(?:cm|mm|ft|km|dm|in|yd|mi|units?|(?:centi|kilo)?met(?:er|re)s?|inches|feet|yards?"
    r"|miles?))\s*\^\s*(?:[23]|\{\s*[23]\s*\})$"
)
_ENDS_OF_UNITS = ("2", "3", "}", "C", "F")
_TEMPERATURE = re.compile(r"(\^\s*(?:\\circ|\{\s*\\circ\s*\}))\s*[CF]$")

_WORDS = re.compile(r"[A-Za-z]+(?:\s+[A-Za-z]+)*")
_LONG_WORD = re.compile(r"[A-Za-z]{4}")  # four letters in a row are a word, fewer may be a product of variables
_NUMBER_AND_WORDS = re.compile(r"(-?(?:\\?\$)?\d[\d.,/]*)\s+([A-Za-z]{4,}(?:\s+[A-Za-z]+)*)")
_IN_TEXT = re.compile(r"\\text\s*\{\s*([^{}]*?)\s*\}")
# Before these words a number is not the value of the answer.
_WORDS_THAT_COUNT = (
    f"{NUMERALS} and base choose less minus modulo more over percent percentage plus remainder score sqrt than times "
    "to with without or january february march april may june july august september october november december"
)
_COUNTS = re.compile(rf"\b(?:{_WORDS_THAT_COUNT.replace(' ', '|')})\b", re.IGNORECASE)


def to_latex(answer: str) -> str | None:
    r"""Rewrite an answer so that math-verify reads all of it; as `\boxed{answer}` if it has no `$...$` or box itself.

    Returns: None if the answer is ambiguous (unbalanced braces, or `1 2`, which math-verify would add).
    """
    text = _rewrite(clean(answer))
    if not text or not has_balanced_braces(text) or ("\\" not in text and _ADJACENT_NUMBERS.search(text)):
        return None
    if not _HAS_MATH_DELIMITERS.search(text):
        return rf"\boxed{{{text}}}"
    return rf"\boxed{{{', '.join(formulas)}}}" if (formulas := adjacent_formulas(text)) else text


def clean(answer: str) -> str:
    r"""Remove what stands around an answer: space, `**`, a full stop, `$...$`, `\boxed{...}`, a font, a leading `=`."""
    text = _LOOK.sub("", without_symbols(answer)).strip()
    before = ""
    while text != before:
        before = text
        text = text.strip("*").strip()
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1].rstrip()
        if text.endswith((",", ";")) and not text.endswith(("\\,", "\\;")) and not _SEPARATOR.search(text[:-1]):
            text = text[:-1].rstrip()  # not of a list, which may be cut off
        text = _unwrap(text)
        last = _CURRENCY_LAST.search(text, max(0, len(text) - _TAIL))
        if last and (last[0].endswith(r"\$") or text.count("$") <= 1):
            text = text[: last.start()]
        if match := _LEADING.match(text):
            text = text[match.end() :]
    return _POINT_FIRST.sub(r"\g<1>0", _SPACE_AFTER_MINUS.sub("-", text, count=1) if text.startswith("-") else text)


def _unwrap(text: str) -> str:
    if not text.startswith(("\\", "$")):
        return text
    for opening, closing in _DELIMITERS:
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            inner = text[len(opening) : -len(closing)]
            is_one = has_balanced_braces(inner) if closing == "}" else closing not in inner and opening not in inner
            return inner.strip() if is_one and not inner.endswith("\\") else text
    return text


def _rewrite(text: str) -> str:
    if match := _E_NOTATION.fullmatch(text) or _TIMES_POWER_OF_TEN.fullmatch(text):
        sign, whole, decimals, *exponents = match.groups(default="")
        return _without_exponent(sign, whole, decimals, "".join(exponents))
    if scaled := _SCALED.fullmatch(text):
        return _without_exponent(scaled[1], scaled[2], scaled[3] or "", _SCALES[scaled[4]])
    if repeating := _REPEATING.fullmatch(text):
        return _as_fraction(*repeating.groups())
    if hour := _FULL_HOUR.fullmatch(text):
        return rf"\text{{{hour[1]}}}"
    if _DATE.fullmatch(text):
        return rf"\text{{{text}}}"
    if named := _ORDINAL.fullmatch(text) or _CHOICE.fullmatch(text):
        return named[1]
    in_text = _IN_TEXT.fullmatch(text)
    counted = _NUMBER_AND_WORDS.fullmatch(in_text[1] if in_text else text)
    if counted and not _COUNTS.search(counted[2]):
        text = counted[1]
    elif _LONG_WORD.search(text) and _WORDS.fullmatch(text):
        # Without \text math-verify reads letters as a product, and "listen" would equal "silent".
        return r"\infty" if text.lower() == "infinity" else rf"\text{{{text}}}"
    return _rewrite_numbers(text)


def _rewrite_numbers(text: str) -> str:
    text = _LATEX_THOUSANDS.sub("", text).replace("~", " ")
    if text.endswith(_ENDS_OF_UNITS):
        text = _TEMPERATURE.sub(r"\1", _SQUARED_UNIT.sub("", text))
    text = _THOUSANDS_IN_BRACES.sub(_without_commas, text)
    text = _UPRIGHT_CONSTANT.sub(
        lambda match: f"{match['command']} {match['letter']}" if match["command"] else match["letter"], text
    )
    text = _TEXT_FONT.sub(r"\\text", _BOLD.sub("", to_radians(text)))
    if "d" in text or r"\partial" in text:
        text = _RATE.sub(lambda match: "d_{{{}d{}}}".format(*filter(None, match.groups())), text)
    if "'" in text or r"\prime" in text:
        text = _PRIMED.sub(_with_primes, text)
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", text)
    if _THOUSANDS_IN_FRACTION.fullmatch(text):
        text = text.replace(",", "")
    if "\\" not in text:  # without a command (`\frac 1 2`), spaces are thousands separators or mixed numbers
        text = _SPACED_THOUSANDS.sub(lambda match: re.sub(r"\s", "", match[0]), text)
        text = _MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", text)
    return expand_plus_minus(text.replace(r"\varnothing", r"\emptyset"))


def _with_primes(match: re.Match[str]) -> str:
    return f"{match['name']}_{{{len(re.findall(_PRIME, match['primes'])) * 'prime'}}}"


def _without_commas(match: re.Match[str]) -> str:
    return match[0].replace(",", "")


def _without_exponent(sign: str, whole: str, decimals: str, exponent: str) -> str:
    """Write out a power of ten exactly: math-verify multiplies binary floats, in which 1.1 times 100 is not 110."""
    shift = int(exponent) - len(decimals)
    if abs(shift) > _LARGEST_SHIFT:
        return rf"{sign}{whole}.{decimals or 0} \times 10^{{{int(exponent)}}}"
    digits = int(whole + decimals)
    return f"{sign}{digits * 10**shift}" if shift >= 0 else rf"{sign}\frac{{{digits}}}{{{10**-shift}}}"


def _as_fraction(sign: str, whole: str, decimals: str, period: str) -> str:
    numerator = int(whole + decimals + period) - int(whole + decimals)
    return rf"{sign}\frac{{{numerator}}}{{{(10 ** len(period) - 1) * 10 ** len(decimals)}}}"
