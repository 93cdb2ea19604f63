"""Find the program in a response: the last closed ```python fence.

A fence may stand anywhere: in a line of text, in a list item with the program indented, with more than three backticks,
with an info string. Backticks in the program's strings and comments do not end it, unless nothing else does.
"""

import re

_OPENING = re.compile(r"(?<!`)(`{3,}+)[ \t]*\{?\.?(?:python|py)[0-9.]*(?![\w+-])[^`\r\n]*\r?\n", re.IGNORECASE)
# Python's strings and comments, a triple quote that is never closed, backticks. A quote that is not closed takes the
# line; a comment ends before backticks that end the line.
_TOKEN = re.compile(
    r"""("{3}(?:\\.|[^\\])*?"{3}|'{3}(?:\\.|[^\\])*?'{3}|\\.|\#(?:(?!`{3,}+[ \t]*$)[^\n])*)"""
    r"""|(?P<unclosed>"{3}|'{3})"""
    r"""|("(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?)"""
    r"""|(?P<backticks>`{3,}+)""",
    re.DOTALL | re.MULTILINE,
)
_FIRST_INDENTATION = re.compile(r"(?:[ \t]*(?:\#[^\n]*)?\r?\n)*([ \t]*)")
_MAX_FAILURES = 20  # to read a fence as Python; each may read the whole response


def last_program(response: str) -> str | None:
    """Return what stands in the last closed ```python fence; None when there is none."""
    program, position, failures_left = None, 0, _MAX_FAILURES
    while opening := _OPENING.search(response, position):
        end = _end_in_python(response, opening) if failures_left else -1
        if end < 0:
            failures_left -= failures_left > 0
            end = response.find("```", opening.end())
        if end < 0:
            break
        position = end
        if not _OPENING.match(response, end):  # else the fence before it was never closed
            program = _without_indentation(response[opening.end() : end])
            position += len(opening[1])
    return program


def _end_in_python(response: str, opening: re.Match[str]) -> int:
    """Return where the first backticks outside of strings and comments are; -1 for none, or for a string without an
    end.
    """
    for token in _TOKEN.finditer(response, opening.end()):
        if token["unclosed"]:
            return -1
        if token["backticks"] and len(token["backticks"]) >= len(opening[1]):
            return token.start()
    return -1


def _without_indentation(program: str) -> str:
    """Take the first statement's indentation from all lines that have it: a program begins in the first column."""
    found = _FIRST_INDENTATION.match(program)
    indentation = found[1] if found else ""
    return "\n".join(line.removeprefix(indentation) for line in program.split("\n")) if indentation else program
