"""Test `python -m rewards score`: an output line for each input line."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coati_rl.errors import ConfigError
from coati_rl.reward_spec import RewardColumns
from coati_rl.types import Problem
from rewards.__main__ import main
from rewards.commands.score_command import parse_line
from tests.unit.rewards.http_server import ScriptedServer

REPOSITORY = Path(__file__).parents[3]
GOOD = b'{"response": "\\\\boxed{5}", "gt_answer": "5"}\n'


def run(arguments: list[str], stdin: bytes, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    return main(arguments)


def lines(*rows: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_each_line_in_gives_one_line_out_in_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin = lines(
        {"response": r"\boxed{72}", "gt_answer": "72"},
        {"response": r"\boxed{72}", "gt_answer": 72},
        {"response": r"\boxed{1/2}", "gt_answer": 0.5},
        {"response": r"\boxed{1/100000}", "gt_answer": 1e-05},
        {"response": r"\boxed{73}", "gt_answer": "72"},
        {"response": "no box", "gt_answer": "72", "test_cases": None},
        {"response": r"\boxed{72}", "gt_answer": r"\frac{"},
    )
    assert run(["score", "--type", "boxed"], stdin, monkeypatch) == 0
    printed = capsys.readouterr()
    scores = [json.loads(line) for line in printed.out.splitlines()]
    assert scores[0] == {
        "reward": 1.0,
        "answer_correct": True,
        "format_valid": True,
        "verdict": "ok",
        "detail": "72 equals 72",
    }
    assert [score["verdict"] for score in scores] == ["ok", "ok", "ok", "ok", "wrong", "wrong", "invalid"]
    assert [score["reward"] for score in scores] == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert printed.err == ""


@pytest.mark.full
def test_the_tags_reward_can_be_chosen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stdin = b'{"response": "<think>a</think><answer>5</answer>", "gt_answer": "5"}'
    assert run(["score", "--type", "think_answer_tags", "--num-workers", "2"], stdin, monkeypatch) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "ok"


def test_test_cases_are_run_as_programs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    test_cases = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
    stdin = lines(
        {"response": "```python\nprint(sum(map(int, input().split())))\n```", "test_cases": test_cases},
        {"response": "```python\nprint(3)\n```", "test_cases": test_cases},
        {"response": "```python\nwhile True: pass\n```", "test_cases": test_cases},
        {
            "response": "```python\ndef add(a, b):\n    return a + b\n```",
            "test_cases": {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]},
        },
    )
    assert run(["score", "--type", "code", "--test-timeout-s", "1"], stdin, monkeypatch) == 0
    scores = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [score["verdict"] for score in scores] == ["ok", "wrong", "wrong", "ok"]


@pytest.mark.full
def test_a_function_of_ones_own_is_found_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("def short(response, ground_truth):\n    return float(len(response) < 9)\n")
    monkeypatch.chdir(tmp_path)
    stdin = lines({"response": r"\boxed{5}", "gt_answer": "5"}, {"response": "5", "gt_answer": "5"})
    assert run(["score", "--type", "mine.py:short"], stdin, monkeypatch) == 0
    scores = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [score["reward"] for score in scores] == [0.0, 1.0]


@pytest.mark.full
def test_several_rewards_are_summed_and_broken_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("def short(response, ground_truth):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path)
    assert run(["score", "--type", "boxed=1,mine.py:short=0.2"], GOOD, monkeypatch) == 0
    score = json.loads(capsys.readouterr().out)
    assert score["reward"] == pytest.approx(1.1)
    assert sorted(score["breakdown"].values()) == [0.5, 1.0]


@pytest.mark.full
def test_a_served_model_is_asked_with_the_rows_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin = lines({"response": "5", "gt_answer": 5, "prompt": "2+3="})
    with ScriptedServer((200, {}, b'{"rewards": [0.75]}')) as server:
        assert run(["score", "--type", f"{server.url}/get_reward"], stdin, monkeypatch) == 0
    assert json.loads(capsys.readouterr().out)["reward"] == 0.75
    assert json.loads(server.requests[0][3]) == {"query": ["2+3=5"], "prompts": ["2+3="], "labels": ["5"]}


def test_a_line_holds_what_scorers_get_to_see() -> None:
    messages = [{"role": "user", "content": "2+3?"}]
    line = lines({"response": "5", "gt_answer": 5, "messages": messages, "prompt": "u:2+3?", "source": "gsm8k"})
    assert parse_line(line, 3) == (
        "5",
        Problem(ground_truth="5", uid="line 3", messages=tuple(messages), prompt="u:2+3?"),
    )
    tests = {"inputs": ["1"], "outputs": ["2"], "fn_name": "f"}
    assert json.loads(parse_line(lines({"response": "", "test_cases": tests}), 1)[1].ground_truth) == tests


def test_a_response_that_ends_the_messages_is_not_a_part_of_the_prompt() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    asked = [{"role": "user", "content": "2+3?"}, call, {"role": "tool", "content": "5"}]
    row = {"response": "5", "gt_answer": "5", "messages": [*asked, {"role": "assistant", "content": "5"}]}
    response, problem = parse_line(lines(row), 1, columns=RewardColumns(are_kept=True))
    assert (response, problem.messages) == ("5", tuple(asked))
    assert problem.columns == {"gt_answer": "5", "messages": asked}
    twice = {**row, "messages": [*row["messages"], row["messages"][-1]]}
    assert parse_line(lines(twice), 1)[1].messages == tuple(row["messages"])


def test_a_function_of_trl_finds_the_response_in_completions_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "def roles(prompts, completions):\n"
        "    assert [message['role'] for message in prompts[0] + completions[0]] == ['user', 'assistant']\n"
        "    return [1.0]\n"
    )
    monkeypatch.chdir(tmp_path)
    messages = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}]
    stdin = lines({"response": "5", "messages": messages}, {"response": "5", "messages": messages[:1]})
    assert run(["score", "--type", "mine.py:roles"], stdin, monkeypatch) == 0
    assert [json.loads(line)["detail"] for line in capsys.readouterr().out.splitlines()] == ["", ""]


@pytest.mark.parametrize("key", ["answer", "ground_truth", "label"])
def test_a_lines_answer_may_have_another_name(key: str) -> None:
    assert parse_line(lines({"response": "5", key: 5}), 1)[1].ground_truth == "5"
    assert parse_line(lines({"response": "5", "gt_answer": "4", key: 5}), 1, key)[1].ground_truth == "5"
    with pytest.raises(ConfigError, match="line 1 has no"):
        parse_line(lines({"response": "5", key: 5}), 1, "solution")


@pytest.mark.full
def test_a_line_separator_inside_of_a_string_does_not_end_the_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin = '{"response": "a\N{LINE SEPARATOR}\\\\boxed{7}", "gt_answer": 7}'.encode()
    assert run(["score", "--type", "boxed"], stdin, monkeypatch) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "ok"


def test_an_empty_input_gives_an_empty_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["score", "--type", "boxed"], b"", monkeypatch) == 0
    assert capsys.readouterr().out == ""


BAD_LINES = [
    (b"{broken", "line 2 is not JSON"),
    (b"\xff", "line 2 is not JSON"),
    (b"[" * 100_000, "line 2 is not JSON"),
    (b"[1]", 'line 2 has no "response" (text)'),
    (b'{"gt_answer": "5"}', 'line 2 has no "response" (text)'),
    (b'{"response": 5, "gt_answer": "5"}', 'line 2 has no "response" (text)'),
    (b'{"response": "5"}', 'line 2 has no "gt_answer" (text or a finite number) and no "test_cases"'),
    (b'{"response": "5", "gt_answer": null}', 'line 2 has no "gt_answer"'),
    (b'{"response": "5", "gt_answer": true}', "line 2: gt_answer is bool; write text or a number"),
    (b'{"response": "5", "gt_answer": NaN}', "line 2: gt_answer is nan; write text or a finite number"),
    (b'{"response": "5", "gt_answer": ["5"]}', "line 2: gt_answer is list; write text or a number"),
    (b'{"response": "5", "test_cases": []}', "line 2: has no test_cases"),
    (b'{"response": "5", "test_cases": {"inputs": []}}', "line 2: test_cases has no list of inputs"),
    (b'{"response": "5", "test_cases": {"inputs": "1", "outputs": ["1"]}}', "line 2: test_cases has no list of inputs"),
    (
        b'{"response": "5", "test_cases": {"inputs": ["1", "2"], "outputs": ["1"]}}',
        "line 2: test_cases has 2 inputs and 1 outputs",
    ),
    (
        b'{"response": "5", "gt_answer": "5", "test_cases": {"inputs": [], "outputs": []}}',
        'line 2 has "gt_answer" and "test_cases"; keep the one',
    ),
    (b'{"response": "5", "gt_answer": "5", "messages": "hi"}', 'line 2: "messages" must be'),
    (b'{"response": "5", "gt_answer": "5", "messages": ["hi"]}', 'line 2: "messages" must be'),
    (
        b'{"response": "5", "gt_answer": "5", "messages": [{"role": "assistant", "content": "6"}]}',
        'line 2: "messages" ends with a turn of the assistant that is not the "response"; leave that turn out',
    ),
    (b'{"response": "5", "gt_answer": "5", "prompt": ["hi"]}', 'line 2: "prompt" must be text'),
]


@pytest.mark.parametrize(("line", "complaint"), BAD_LINES)
def test_a_bad_line_ends_with_exit_2_and_its_number_and_nothing_is_scored(
    line: bytes, complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = b'{"response": "5", "gt_answer": "5"}\n'
    assert run(["score", "--type", "boxed"], good + line + b"\n" + good, monkeypatch) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert complaint in output.err
    assert output.err.count("\n") == 1


@pytest.mark.parametrize("blank", [b"\n", b" \t\r\n"])
def test_a_blank_line_is_refused_since_the_output_would_lose_the_numbers_of_the_lines(
    blank: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["score", "--type", "boxed"], GOOD + blank + GOOD, monkeypatch) == 2
    output = capsys.readouterr()
    assert (output.out, "line 2 is blank; remove it" in output.err) == ("", True)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("box", "unknown reward 'box'"),
        ("/no/such/my_rewards.py:score", "no file /no/such/my_rewards.py"),
        ("~nobody-of-that-name/my_rewards.py:score", "--type"),
        ("boxed=1,boxed=2", "boxed is named twice"),
        ("http://", "http://"),
    ],
)
def test_a_reward_type_that_cannot_be_used_ends_with_exit_2(
    name: str, complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["score", "--type", name], b"", monkeypatch) == 2
    output = capsys.readouterr().err
    assert complaint in output
    assert output.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["score"], ["judge"], ["score", "--type", "boxed", "--num-workers", "two"]])
def test_bad_arguments_end_with_exit_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--num-workers", "0"], "--num-workers is 0: it must be at least 1"),
        (["--timeout-s", "0"], "--timeout-s is 0: it must be positive and finite"),
        (["--timeout-s", "nan"], "--timeout-s is nan: it must be positive and finite"),
        (["--timeout-s", "inf"], "--timeout-s is inf: it must be positive and finite"),
        (["--test-timeout-s", "-1"], "--test-timeout-s is -1: it must be positive and finite"),
        (["--test-memory-mb", "31"], "--test-memory-mb is 31: it must be at least 32"),
    ],
)
def test_sizes_that_are_too_small_end_with_exit_2(
    flags: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["score", "--type", "boxed", *flags], b"", monkeypatch) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.full
def test_scoring_does_not_pay_for_the_web_server() -> None:
    code = (
        "import sys; from rewards.__main__ import main; main();"
        "print(sorted({'fastapi', 'uvicorn', 'httpx2', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "score", "--type", "boxed"],
        input=b"",
        capture_output=True,
        cwd=REPOSITORY,
        check=True,
    )
    assert done.stdout == b"[]\n"
