"""Test that ground truths that the math rewards cannot read are counted before a run."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import rl_example
from coati_rl.config.cli import build_config
from coati_rl.types import Prompt
from rewards import ground_truths
from rewards.ground_truths import ground_truth_warnings

UNREADABLE = r"a \otimes b"


def prompts(*truths: str) -> list[Prompt]:
    return [Prompt(uid=f"train-{row}", token_ids=(1,), ground_truth=truth) for row, truth in enumerate(truths)]


@pytest.mark.full
def test_rows_that_cannot_be_read_are_counted_and_the_first_is_named() -> None:
    config = build_config({"reward_type": "boxed"})
    rows = prompts("5", UNREADABLE, r"\sqrt{2}", "1/0", UNREADABLE, r"\frac{", "Monday", r"\cos t")
    (warning,) = ground_truth_warnings(config, {"--dataset": rows, "--eval-dataset math": prompts("5", r"\pi")})
    assert warning == (
        "--dataset: 4 of 8 ground truths cannot be read by the math reward (the first is train-1: a \\otimes b); for "
        "these rows only the same text is correct, and all other responses are invalid and masked; correct or remove "
        "the rows"
    )


@pytest.mark.full
def test_of_several_tasks_the_rows_of_math_are_read() -> None:
    config = build_config({"reward_type": "code", "tasks": {"math": {"reward_type": "boxed"}}})
    of_math = [replace(prompt, task="math") for prompt in prompts("5", UNREADABLE)]
    (warning,) = ground_truth_warnings(config, {"--dataset": [*prompts('{"inputs": []}', UNREADABLE), *of_math]})
    assert warning.startswith(
        "--dataset: 1 of 2 ground truths cannot be read by the math reward (the first is train-1:"
    )


@pytest.mark.full
def test_of_many_some_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ground_truths, "MAX_TEXTS", 2)
    config = build_config({"reward_type": "think_answer_tags"})
    rows = prompts(UNREADABLE, "Monday", "Tuesday", "Friday")
    (warning,) = ground_truth_warnings(config, {"--dataset": rows})
    assert "1 of 4 ground truths cannot be read by the math reward, 2 of 4 different texts were checked" in warning


@pytest.mark.full
def test_a_run_says_so_before_it_starts(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [{"messages": {"role": "user", "content": "?"}, "gt_answer": truth} for truth in ("5", UNREADABLE)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sizes = "-i 1 -t 1 -g 2 -ibs 2 -imbs 2 -tbs 2 -tMbs 2 -tmbs 4 -mpt 128 -mnt 16 -rt boxed --device cpu --dry-run"
    assert rl_example.main(["-m", str(model_dir), "-d", str(data), *sizes.split()], tmp_path) == 0
    assert "warning: --dataset: 1 of 2 ground truths cannot be read by the math reward" in capsys.readouterr().err


TRUTHS = {"boxed": "72.5", "code": '{"inputs": [], "outputs": []}'}


@pytest.mark.parametrize("reward_type", TRUTHS)
def test_plain_numbers_and_other_rewards_need_no_process(monkeypatch: pytest.MonkeyPatch, reward_type: str) -> None:
    monkeypatch.setattr(ground_truths, "RewardPool", lambda *_, **__: pytest.fail("processes are started"))
    config = build_config({"reward_type": reward_type})
    assert [*ground_truth_warnings(config, {"--dataset": prompts(TRUTHS[reward_type])})] == []


@pytest.mark.full
@pytest.mark.parametrize("reward_type", TRUTHS)
def test_plain_numbers_and_other_rewards_load_no_computer_algebra_system(reward_type: str) -> None:
    code = (
        "import sys; from coati_rl.config.cli import build_config; from coati_rl.types import Prompt\n"
        "from rewards.ground_truths import ground_truth_warnings\n"
        f"rows = [Prompt(uid='0', token_ids=(1,), ground_truth={TRUTHS[reward_type]!r})]\n"
        f"config = build_config({{'reward_type': {reward_type!r}}})\n"
        "assert list(ground_truth_warnings(config, {'--dataset': rows})) == []\n"
        "assert 'sympy' not in sys.modules and 'socket' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
