r"""Find the final answer of a response, the text inside the last \boxed{} or <answer> tag, and formulas in text.

The functions are pure and linear in the length of any text. None means that there is no such answer.
"""

import re

# A run of backslashes is accepted before "boxed": models echo the `\\boxed{}` of an escaped prompt. `\\.` swallows
# escaped characters, so that the `\{` of a set never counts as a brace.
_BRACE_TOKEN = re.compile(r"(?P<boxed>\\+boxed\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)

_FORMULA = re.compile(
    r"\\boxed\s*\{(.*)\}|(?<!\\)\$\$([^$]+)(?<!\\)\$\$|(?<!\\)\$([^$]+)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL
)
_SPACE = re.compile(r"(?:\\[,;:! ]|\\q?quad(?![A-Za-z])|\\\\|~|\s)*")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} with balanced braces; of two nested ones, the inner.

    A box that is not closed (in a truncated response) is skipped.
    """
    open_braces: list[int | None] = []  # where the content of an open \boxed{ starts; None for an ordinary brace
    last_start, last_end = -1, -1
    for token in _BRACE_TOKEN.finditer(text):
        if token["boxed"]:
            open_braces.append(token.end())
        elif token["open"]:
            open_braces.append(None)
        elif token["close"] and open_braces:
            start = open_braces.pop()
            if start is not None and start > last_start:
                last_start, last_end = start, token.start()
    return text[last_start:last_end] if last_start >= 0 else None


def last_answer_tag(text: str) -> str | None:
    """Return the content of the last closed <answer>...</answer>; an <answer> that is not closed is skipped."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end] if start >= 0 else None


def formulas(latex: str) -> list[str]:
    r"""Return the contents of `$...$`, `\(...\)`, `\[...\]` and `\boxed{...}`; `latex` itself if there are none."""
    found = [next(filter(None, match.groups()), "") for match in _FORMULA.finditer(latex)]
    return found or [latex]


def adjacent_formulas(latex: str) -> list[str]:
    r"""Return the contents of two or more formulas with nothing but space around them; [] for anything else."""
    found, end = [], 0
    for match in _FORMULA.finditer(latex):
        if not _SPACE.fullmatch(latex, end, match.start()):
            return []
        found.append(next(filter(None, match.groups()), ""))
        end = match.end()
    return found if len(found) > 1 and _SPACE.fullmatch(latex, end) else []


def has_balanced_braces(text: str) -> bool:
    """Return True if all unescaped braces are balanced."""
    depth = 0
    for token in _BRACE_TOKEN.finditer(text):
        if token["boxed"] or token["open"]:
            depth += 1
        elif token["close"]:
            depth -= 1
            if depth < 0:
                return False
    return depth == 0
