"""Find the program in a response: the last closed ```python fence.

A fence may be anywhere: in a line of text, in a list item with the program indented, with more than three backticks,
with an info string. Backticks in the program's strings and comments only end it if there are no others.
"""

import re

_OPENING = re.compile(r"(?<!`)(`{3,}+)[ \t]*\{?\.?(?:python|py)[0-9.]*(?![\w+-])[^`\r\n]*\r?\n", re.IGNORECASE)
# Python's strings and comments, a triple quote that is not closed, backticks. A quote that is not closed extends to the
# end of its line; a comment ends before backticks at the end of its line.
_TOKEN = re.compile(
    r"""("{3}(?:\\.|[^\\])*?"{3}|'{3}(?:\\.|[^\\])*?'{3}|\\.|\#(?:(?!`{3,}+[ \t]*$)[^\n])*)"""
    r"""|(?P<unclosed>"{3}|'{3})"""
    r"""|("(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?)"""
    r"""|(?P<backticks>`{3,}+)""",
    re.DOTALL | re.MULTILINE,
)
_FIRST_INDENTATION = re.compile(r"(?:[ \t]*(?:\#[^\n]*)?\r?\n)*([ \t]*)")
_MAX_FAILURES = 20  # failed attempts to read a fence as Python; each may read the whole response


def last_program(response: str) -> str | None:
    """Return the content of the last closed ```python fence; None if there is none."""
    program, position, failures_left = None, 0, _MAX_FAILURES
    while opening := _OPENING.search(response, position):
        end = _end_in_python(response, opening) if failures_left else -1
        if end < 0:
            failures_left -= failures_left > 0
            end = response.find("```", opening.end())
        if end < 0:
            break
        position = end
        if not _OPENING.match(response, end):  # otherwise the fence before it is not closed
            program = _without_indentation(response[opening.end() : end])
            position += len(opening[1])
    return program


def _end_in_python(response: str, opening: re.Match[str]) -> int:
    """Return the index of the first backticks outside of strings and comments; -1 if there are none."""
    for token in _TOKEN.finditer(response, opening.end()):
        if token["unclosed"]:
            return -1
        if token["backticks"] and len(token["backticks"]) >= len(opening[1]):
            return token.start()
    return -1


def _without_indentation(program: str) -> str:
    """Remove the first statement's indentation from all lines that have it."""
    found = _FIRST_INDENTATION.match(program)
    indentation = found[1] if found else ""
    return "\n".join(line.removeprefix(indentation) for line in program.split("\n")) if indentation else program
