"""Test the pipeline example without training: its commands, that each stage reads what an earlier one writes, failures.

The script runs with programs in place of Python and coati-rl that only write down how they were called.
"""

import json
import shutil
import subprocess
from pathlib import Path

import make_tiny_model
import pytest

from coati_rl.config.cli import parse_job
from coati_rl.config.commands import ALL, OFFLINE
from coati_rl.config.generate import GenerateConfig
from coati_rl.config.generate_rules import check_generate
from coati_rl.config.offline_rules import check_offline
from coati_rl.config.rules import check

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "pipeline_example.sh"
ENVIRONMENT = """
REPOSITORY="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$REPOSITORY/.venv"
PYTHON="$VENV/bin/python"
"""
# Appends its arguments as one line, separated by tabs; fails if they have the word in the file `fail`.
PROGRAM = """#!/usr/bin/env bash
(IFS=$'\\t'; printf '%s\\n' "${0##*/}"$'\\t'"$*" >>calls)
if [[ -f fail && "$*" == *"$(cat fail)"* ]]; then echo "the reason"; exit 7; fi
"""
Calls = list[list[str]]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A folder with the script and the recording programs."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in (SCRIPT.name, "stages.sh"):
        shutil.copy(SCRIPT.with_name(name), tmp_path / "scripts")
    (tmp_path / "scripts" / "environment.sh").write_text(ENVIRONMENT)
    for name in ("python", "coati-rl"):
        program = tmp_path / ".venv" / "bin" / name
        program.write_text(PROGRAM)
        program.chmod(0o755)
    return tmp_path


def run(repository: Path) -> subprocess.CompletedProcess[str]:
    script = repository / "scripts" / SCRIPT.name
    return subprocess.run([script], capture_output=True, text=True, timeout=60, check=False)


def calls(repository: Path) -> Calls:
    return [line.split("\t") for line in (repository / "calls").read_text().splitlines()]


def test_every_command_is_understood_and_reads_what_an_earlier_one_writes(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(repository)
    assert done.returncode == 0, done.stderr
    *stages, report = calls(repository)
    assert report == ["python", "scripts/pipeline_report.py", "runs/pipeline"]
    written: set[Path] = set()
    for program, command, *arguments in stages:
        if program == "python":
            assert command == "scripts/make_tiny_model.py"
            monkeypatch.setattr("sys.argv", [command, *arguments])
            made = make_tiny_model.parse_arguments()
            written |= {made.out_dir, *(made.out_dir / f"{name}.jsonl" for name in ("sft", "train", "eval"))}
            continue
        config, _ = parse_job(arguments, ALL[command])
        assert inputs(config) <= written, f"{command} {arguments}"
        if isinstance(config, GenerateConfig):
            check_generate(config)
            written.add(Path(config.output.output))
        else:
            check_offline(config) if command in OFFLINE else check(config)
            written.add(Path(config.run.run_dir, "checkpoints", f"step-{config.data.max_steps}"))
    assert [command for program, command, *_ in stages if program == "coati-rl"] == [
        *("sft", "generate", "generate", "rm", "rl", "rl", "sft", "generate", "sft"),
        *["generate"] * 5,
    ]


def inputs(config) -> set[Path]:
    """The models and files that a command reads."""
    values = config.flat()
    evaluation = (values.get("eval_dataset") or {}).values()
    reward = str(values.get("reward_type", "")).partition("model:")[2].rpartition("=")[0]
    found = [values["model"], values["dataset"], *evaluation, values.get("teacher")]
    if reward:  # its directory is absolute from here on
        found.append(str(Path(reward).relative_to(Path.cwd())))
    return {Path(each) for each in found if each}


def test_a_stage_that_fails_ends_the_script_with_its_output_and_goes_on_there(repository: Path) -> None:
    (repository / "fail").write_text("rm -m")
    failed = run(repository)
    assert failed.returncode == 1
    assert (
        "the reason\n[pipeline] failed: reward-model; its whole output is in runs/pipeline/logs/reward-model.log"
        in (failed.stderr)
    )
    begun = calls(repository)
    assert begun[-1][:2] == ["coati-rl", "rm"]
    (repository / "fail").unlink()
    assert run(repository).returncode == 0
    assert calls(repository)[len(begun)] == begun[-1]  # the stages before it are not repeated
    timing = json.loads((repository / "runs/pipeline/stages/reward-model.json").read_text())
    assert set(timing) == {"seconds"}
    finished = len(calls(repository))
    assert run(repository).returncode == 0
    assert len(calls(repository)) == finished + 1  # the report alone
