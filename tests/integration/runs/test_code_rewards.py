"""Test code rewards in a whole run: prompts with tests, generated programs, the sandbox, vLLM and a trainer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]  # training the tiny model counts as the test's own time
SCRIPT = Path(__file__).parents[3] / "scripts" / "make_tiny_model.py"


@pytest.fixture(scope="module")
def tiny_coder(tmp_path_factory):
    """A model that knows six programs and writes the same one whatever is asked, mostly."""
    directory = tmp_path_factory.mktemp("tiny") / "coder"
    flags = ["--task", "code", "--steps", "80", "--vocab-size", "320"]
    subprocess.run([sys.executable, SCRIPT, directory, *flags], check=True, timeout=240)
    return directory


def test_a_tiny_model_learns_which_program_is_asked_for(tiny_coder, start_run):
    scoring = "-rt code --reward-workers 2 --test-timeout-s 5"
    training = "-i 1 -t 1 -g 8 -kl 0 -lr 3e-4 -ibs 16 -imbs 16 -tbs 16 -tMbs 16 -tmbs 16 -mnt 32 -mpt 128"
    run = start_run(
        *("-m", tiny_coder, "-d", tiny_coder / "train.jsonl", "-ed", json.dumps({"code": f"{tiny_coder}/eval.jsonl"})),
        *scoring.split(),
        *training.split(),
        *("-ei", 8, "--max-steps", 8, "--master_port", 0),
    )
    run.wait_for_step(2)
    assert any("supervisor.py" in " ".join(process.cmdline()) for process in run.processes("bwrap"))
    assert run.wait() == 0, run.text()
    before, after = (json.loads(line) for line in (run.run_dir / "eval" / "summary.jsonl").read_text().split("\n")[:-1])
    assert before["accuracy"] < 0.3 and after["accuracy"] > 0.8, "of 1/6 to all, greedily"
    assert before["num_invalid"] == after["num_invalid"] == 0
    records = run.records()
    assert all(record["samples_invalid"] == 0 for record in records)
    assert all(0 < record["reward_mean"] <= record["reward/tests_passed"] <= 1 for record in records)
    samples = [json.loads(line) for path in (run.run_dir / "rollouts").iterdir() for line in path.open()]
    assert {sample["verdict"] for sample in samples} == {"ok", "wrong"}
    right = next(sample for sample in samples if sample["verdict"] == "ok")
    assert right["detail"] == "4 of 4 tests passed" and right["breakdown"] == {"tests_passed": 1.0}
    assert "print(" in right["response"]
    assert run.left_over() == []
