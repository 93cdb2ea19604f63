"""Test `python -m rewards score` on streams: input is read in full first, scores are written as they are known."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coati_rl.reward_spec import RewardSpec
from rewards import RewardPool
from rewards.commands import score_command

REPOSITORY = Path(__file__).parents[3]
GOOD = b'{"response": "\\\\boxed{5}", "gt_answer": "5"}\n'
BOXED = [sys.executable, "-m", "rewards", "score", "--type", "boxed"]


@pytest.mark.sampled(2)
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


@pytest.mark.full
def test_a_bounded_number_of_lines_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_command, "_MAX_IN_FLIGHT", 4)
    num_read = 0

    def lines() -> Iterator[bytes]:
        nonlocal num_read
        for number in range(40):
            num_read += 1
            yield GOOD if number % 2 else GOOD.replace(b'"5"', b'"6"')

    verdicts = []
    with RewardPool(RewardSpec(reward_type="boxed")) as pool:
        for score in score_command._scores(pool, lines()):
            verdicts.append(score.verdict)
            assert num_read - len(verdicts) <= 4
    assert verdicts == ["wrong", "ok"] * 20


@pytest.mark.full
def test_scores_are_written_as_they_come(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import time\ndef score(response, ground_truth):\n    return time.sleep(600) if response == 'sleep' else 1\n"
    )
    command = [*BOXED[:-1], f"{tmp_path}/own.py:score", "--timeout-s", "600"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(GOOD * 3 + b'{"response": "sleep", "gt_answer": "5"}\n')
        process.stdin.close()
        assert [json.loads(process.stdout.readline())["verdict"] for _ in range(3)] == ["ok"] * 3
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(30) == 130
        finally:
            process.kill()  # else leaving the block waits for what does not end


@pytest.mark.full
def test_a_reader_that_has_seen_enough_ends_it() -> None:
    with subprocess.Popen(BOXED, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(GOOD * 2000)
        process.stdin.close()
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 1
