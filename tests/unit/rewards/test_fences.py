"""Test extraction of the program of a response."""

import time

import pytest

from rewards.code.fences import last_program


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nx\n```", "x\n"),
        ("```py\nx\n```", "x\n"),
        ("```python3\nx\n```", "x\n"),
        ("```Python\nx\n```", "x\n"),
        ("``` python \nx\n```", "x\n"),
        ("```python\r\nx\r\n```", "x\r\n"),
        ("text ```python\nx\n``` text", "x\n"),
        ("```python\nx```", "x"),
        ("```python\n```", ""),
        ("```python\nnever closed </think>\n```python\nmeant\n```", "meant\n"),
        ("```python\nfirst\n```\n```python\nlast\n```", "last\n"),
        ("```python\nright\n```\n```python\nwrong\n```\nThe first one is meant.", "wrong\n"),
        ("```python\nclosed\n```\n```python\nopen\n", "closed\n"),
        ("```\nother\n```\n```python\nx\n```\n```cpp\nint main;\n```", "x\n"),
        ("<think>```python\nmaybe\n```</think>```python\nx\n```", "x\n"),
        ('```python\nprint("```")\n```', 'print("```")\n'),
        ("```python\nx  # not ``` here\n```", "x  # not ``` here\n"),
        ("```python\nx  # here```\n```text\ny\n```", "x  # here"),
        ("```python\n'''\n```\n'''\n```", "'''\n```\n'''\n"),
        ("```python\n'''\n```python\nx\n```\n'''\n```", "'''\n```python\nx\n```\n'''\n"),
        ("```python\n'''\n```\n```python\nx\n```", "x\n"),  # a text without an end does not take the next program
        ('```python\n"""\n```\n```python\n"""doc"""\n```', '"""doc"""\n'),
        ("```python\nx = '```\n```", "x = '```\n"),
        ('```python\n"\\"```"\n```', '"\\"```"\n'),
        ("````python\nx\n````", "x\n"),
        ("````python\nx\n```\ny\n````", "x\n```\ny\n"),
        ("````python\nx\n```", "x\n"),
        ('```python title="a.py"\nx\n```', "x\n"),
        ("```python:a.py\nx\n```", "x\n"),
        ("```{.python .numberLines}\nx\n```", "x\n"),
        ("```python3.11 \nx\n```", "x\n"),
        ("1. Text\n\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y\n"),
        ("- ```python\n  x\n\n  y\n  ```", "x\n\ny\n"),
        ("*\t```python\n\t# x\n\n\tx\n\t\ty\n\t```", "# x\n\nx\n\ty\n"),
        ("   ```python\n   x = 1\n y\n```", "x = 1\n y\n"),
        ("```python\n  # x\nx\n  y\n```", "  # x\nx\n  y\n"),  # a comment may stand anywhere
    ],
)
def test_the_last_closed_fence_is_the_program(response: str, program: str) -> None:
    assert last_program(response) == program


@pytest.mark.parametrize(
    "response",
    [
        "",
        "print(1)",
        "```\nprint(1)\n```",
        "```cpp\nint main;\n```",
        "```python\nprint(1)\n",
        "```python print(1)```",
        "```python\nprint(1)\n``",
        "'''python\nprint(1)\n'''",
        "```pythonic\nprint(1)\n```",
        "```python-repl\nprint(1)\n```",
        "```py`thon\nprint(1)\n```",
        "``` `python\nprint(1)\n```",
    ],
)
def test_without_a_closed_fence_there_is_no_program(response: str) -> None:
    assert last_program(response) is None


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "response",
    [
        "`" * 10**6,
        "```python\n" * 10**5,
        "``` " * 250_000,
        "```" + " \t" * 500_000,
        "```python " * 10**5,
        '```python\n"""\n```\n' * 50_000,
        '```python\n\\"""\n```\n' * 50_000,
        "```python\n" + "\\'" * 500_000,
        "```python\n'''" + " " * 10**6,
        "```python\n" + " " * 10**6 + "```",
        "```python\n" + "#``` " * 200_000,
        "```python\n#`\n" * 10**5,
    ],
    ids=[
        "backticks",
        "openings",
        "spaced",
        "white space",
        "no line end",
        "triple quotes",
        "escaped triple quotes",
        "escaped quotes",
        "a text without an end",
        "an indentation",
        "comments",
        "comments and openings",
    ],
)
def test_a_response_of_fences_is_read_at_once(response: str) -> None:
    started = time.process_time()
    last_program(response)
    assert time.process_time() - started < 1
