"""`python -m rewards score`: a line in, a line out."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rewards.__main__ import main, read_rows

REPOSITORY = Path(__file__).parents[3]


def run(arguments: list[str], stdin: bytes, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    return main(arguments)


def test_each_line_in_gives_one_line_out_in_order() -> None:
    rows = [
        {"response": r"\boxed{72}", "gt_answer": "72"},
        {"response": r"\boxed{72}", "gt_answer": 72},
        {"response": r"\boxed{1/2}", "gt_answer": 0.5},
        {"response": r"\boxed{1/100000}", "gt_answer": 1e-05},
        {"response": r"\boxed{73}", "gt_answer": "72"},
        {"response": "no box", "gt_answer": "72"},
        {"response": r"\boxed{72}", "gt_answer": r"\frac{"},
    ]
    stdin = "".join(json.dumps(row) + "\n" for row in rows)
    command = [sys.executable, "-m", "rewards", "score", "--type", "boxed"]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=REPOSITORY, check=True)
    scores = [json.loads(line) for line in done.stdout.splitlines()]
    assert scores[0] == {
        "reward": 1.0,
        "answer_correct": True,
        "format_valid": True,
        "verdict": "ok",
        "detail": "72 equals 72",
    }
    assert [score["verdict"] for score in scores] == ["ok", "ok", "ok", "ok", "wrong", "wrong", "invalid"]
    assert [score["reward"] for score in scores] == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert done.stderr == ""


def test_the_tags_reward_can_be_chosen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stdin = b'{"response": "<think>a</think><answer>5</answer>", "gt_answer": "5"}'
    assert run(["score", "--type", "think_answer_tags", "--num-workers", "2"], stdin, monkeypatch) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "ok"


def test_an_empty_input_gives_an_empty_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["score", "--type", "boxed"], b"", monkeypatch) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"{broken", "line 2 is not JSON"),
        (b"", "line 2 is not JSON"),
        (b"\xff", "line 2 is not JSON"),
        (b"[" * 100_000, "line 2 is not JSON"),
        (b"[1]", 'line 2 has no "response" (text)'),
        (b'{"gt_answer": "5"}', 'line 2 has no "response" (text)'),
        (b'{"response": 5, "gt_answer": "5"}', 'line 2 has no "response" (text)'),
        (b'{"response": "5"}', 'line 2 has no "gt_answer"'),
        (b'{"response": "5", "gt_answer": null}', 'line 2 has no "gt_answer"'),
        (b'{"response": "5", "gt_answer": true}', 'line 2 has no "gt_answer"'),
        (b'{"response": "5", "gt_answer": NaN}', 'line 2 has no "gt_answer"'),
        (b'{"response": "5", "test_cases": {"inputs": [], "outputs": []}}', 'line 2 has no "gt_answer"'),
    ],
)
def test_a_bad_line_ends_with_exit_2_and_its_number_and_nothing_is_scored(
    line: bytes, complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = b'{"response": "5", "gt_answer": "5"}\n'
    assert run(["score", "--type", "boxed"], good + line + b"\n" + good, monkeypatch) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert complaint in output.err
    assert output.err.count("\n") == 1


@pytest.mark.parametrize("name", ["code", "my_rewards.py:score", "box"])
def test_a_reward_type_that_cannot_be_used_ends_with_exit_2(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["score", "--type", name], b"", monkeypatch) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["score"], ["judge"], ["score", "--type", "boxed", "--num-workers", "two"]])
def test_bad_arguments_end_with_exit_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize("sizes", [["--num-workers", "0"], ["--timeout-s", "0"]])
def test_sizes_that_are_not_positive_end_with_exit_2(
    sizes: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["score", "--type", "boxed", *sizes], b"", monkeypatch) == 2
    assert "must be positive" in capsys.readouterr().err


def test_a_line_separator_inside_of_a_string_does_not_end_the_line() -> None:
    row = '{"response": "a\N{LINE SEPARATOR}b", "gt_answer": 7}'
    assert read_rows(io.BytesIO(row.encode())) == [("a\N{LINE SEPARATOR}b", "7")]
