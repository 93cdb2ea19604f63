"""`python -m rewards score` as a stream: read in full first, held in part, written as it comes."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from coati_rl.reward_spec import RewardSpec
from rewards import RewardPool
from rewards.commands import score_command
from rewards.commands.score_rows import CheckedRows, Row, parse_row

REPOSITORY = Path(__file__).parents[3]
GOOD = b'{"response": "\\\\boxed{5}", "gt_answer": "5"}\n'
POISON = b'{"response": "\\\\boxed{9^{9^{9^9}}}", "gt_answer": "5"}\n'
BOXED = [sys.executable, "-m", "rewards", "score", "--type", "boxed"]


@pytest.mark.parametrize("is_pipe", [True, False], ids=["pipe", "file"])
def test_a_bad_last_line_is_found_before_the_first_is_scored(is_pipe: bool, tmp_path: Path) -> None:
    content = GOOD * 1000 + b"{broken\n"
    if is_pipe:
        done = subprocess.run(BOXED, input=content, capture_output=True, cwd=REPOSITORY)
    else:
        (tmp_path / "in.jsonl").write_bytes(content)
        with (tmp_path / "in.jsonl").open("rb") as file:
            done = subprocess.run(BOXED, stdin=file, capture_output=True, cwd=REPOSITORY)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"line 1001 is not JSON" in done.stderr


def test_a_file_is_read_from_where_it_stands_and_not_copied(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"a header\n" + GOOD * 2)
    with (tmp_path / "in.jsonl").open("rb") as file:
        file.readline()
        rows = CheckedRows(file)
        assert rows.num_rows == 2
        assert [row.response for row in rows] == [r"\boxed{5}"] * 2
        rows.close()


def test_a_bounded_number_of_rows_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_command, "_MAX_ROWS_IN_FLIGHT", 4)
    num_read = 0

    def rows() -> Iterator[Row]:
        nonlocal num_read
        for number in range(40):
            num_read += 1
            yield parse_row(GOOD if number % 2 else GOOD.replace(b'"5"', b'"6"'), number)

    verdicts = []
    with RewardPool(RewardSpec(reward_type="boxed")) as pool:
        for score in score_command._scores(pool, rows()):
            verdicts.append(score.verdict)
            assert num_read - len(verdicts) <= 4
    assert verdicts == ["wrong", "ok"] * 20


def test_large_rows_are_bounded_by_their_bytes_and_one_that_is_larger_is_scored_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(score_command, "_MAX_BYTES_IN_FLIGHT", len(GOOD) - 1)
    with RewardPool(RewardSpec(reward_type="boxed")) as pool:
        scores = list(score_command._scores(pool, [parse_row(GOOD, 1)] * 3))
    assert [score.verdict for score in scores] == ["ok"] * 3


def test_scores_are_written_as_they_come() -> None:
    command = [*BOXED, "--timeout-s", "20"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(GOOD * 3 + POISON)
        process.stdin.close()
        started = time.monotonic()
        assert [json.loads(process.stdout.readline())["verdict"] for _ in range(3)] == ["ok"] * 3
        assert time.monotonic() - started < 15
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_a_reader_that_has_seen_enough_ends_it() -> None:
    with subprocess.Popen(BOXED, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(GOOD * 2000)
        process.stdin.close()
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 1


def read_terminal(descriptor: int) -> Iterator[bytes]:
    """What is written to the other end, piece by piece, until nobody has that open any more."""
    with suppress(OSError):  # EIO: the last writer is gone
        while piece := os.read(descriptor, 4096):
            yield piece


def test_a_terminal_shows_progress_on_stderr_alone() -> None:
    ours, terminal = pty.openpty()
    with subprocess.Popen(
        BOXED, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=terminal, cwd=REPOSITORY
    ) as process:
        os.close(terminal)
        process.stdin.write(GOOD * 3)
        process.stdin.close()
        shown = b"".join(read_terminal(ours)).decode()
        scored = process.stdout.read().splitlines()
    os.close(ours)
    assert process.returncode == 0
    assert "3/3" in shown
    assert [json.loads(line)["verdict"] for line in scored] == ["ok"] * 3


def test_a_line_separator_inside_of_a_string_does_not_end_the_line() -> None:
    row = '{"response": "a\N{LINE SEPARATOR}b", "gt_answer": 7}'
    (only,) = CheckedRows(io.BytesIO(row.encode()))
    assert (only.response, only.problem.ground_truth) == ("a\N{LINE SEPARATOR}b", "7")
