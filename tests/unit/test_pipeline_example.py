"""Test the pipeline example without training: its commands, that each stage reads what an earlier one writes, failures.

The script runs with programs in place of Python and coati-rl that only write down how they were called.
"""

import json
from pathlib import Path

import make_tiny_model
import pytest

from coati_rl.config.generate import GenerateConfig
from tests.unit.recorded_script import check_job, inputs, make_repository, recorded_calls, run_script

SCRIPT = "pipeline_example.sh"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A folder with the script and the recording programs."""
    return make_repository(tmp_path, SCRIPT)


def test_every_command_is_understood_and_reads_what_an_earlier_one_writes(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run_script(repository, SCRIPT)
    assert done.returncode == 0, done.stderr
    *stages, report = recorded_calls(repository)
    assert report == ["python", "scripts/pipeline_report.py", "runs/pipeline"]
    written: set[Path] = set()
    for program, command, *arguments in stages:
        if program == "python":
            assert command == "scripts/make_tiny_model.py"
            monkeypatch.setattr("sys.argv", [command, *arguments])
            made = make_tiny_model.parse_arguments()
            written |= {made.out_dir, *(made.out_dir / f"{name}.jsonl" for name in ("sft", "train", "eval"))}
            continue
        config = check_job(command, arguments)
        assert inputs(config) <= written, f"{command} {arguments}"
        if isinstance(config, GenerateConfig):
            written.add(Path(config.output.output))
        else:
            written.add(Path(config.run.run_dir, "checkpoints", f"step-{config.data.max_steps}"))
    assert [command for program, command, *_ in stages if program == "coati-rl"] == [
        *("sft", "generate", "generate", "rm", "rl", "rl", "sft", "generate", "sft"),
        *["generate"] * 5,
    ]


def test_a_stage_that_fails_ends_the_script_with_its_output_and_goes_on_there(repository: Path) -> None:
    (repository / "fail").write_text("rm -m")
    failed = run_script(repository, SCRIPT)
    assert failed.returncode == 1
    assert (
        "the reason\n[pipeline] failed: reward-model; its whole output is in runs/pipeline/logs/reward-model.log"
        in (failed.stderr)
    )
    begun = recorded_calls(repository)
    assert begun[-1][:2] == ["coati-rl", "rm"]
    (repository / "fail").unlink()
    assert run_script(repository, SCRIPT).returncode == 0
    assert recorded_calls(repository)[len(begun)] == begun[-1]  # the stages before it are not repeated
    timing = json.loads((repository / "runs/pipeline/stages/reward-model.json").read_text())
    assert set(timing) == {"seconds"}
    finished = len(recorded_calls(repository))
    assert run_script(repository, SCRIPT).returncode == 0
    assert len(recorded_calls(repository)) == finished + 1  # the report alone
