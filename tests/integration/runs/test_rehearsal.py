"""Test rehearsals as commands: a good one passes all stages and leaves nothing, a reward that fails late stops one."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.integration.runs.conftest import ROOT

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]
SIZES = "-b transformers -t 1 -i 1 -ibs 16 -imbs 16 -tbs 8 -tMbs 4 -tmbs 2 -g 8 -mnt 64 -mpt 256 --device cpu"


@pytest.fixture
def rehearse(make_tiny, tmp_path):
    """(more flags, job) -> exit code, and what was found; asserts that nothing is left."""

    def run(*more, job="rl", sizes=SIZES):
        model, run_dir, temporary = (
            make_tiny(tied=True),
            tmp_path / "run",
            Path(tempfile.mkdtemp(prefix="r", dir="/tmp")),
        )
        flags = ["-m", str(model), "-d", str(model / "train.jsonl"), *sizes.split(), "--run-dir", str(run_dir)]
        command = [sys.executable, "-m", "coati_rl.command_line", "rehearse", job, "--json", "--limit-s", "900"]
        done = subprocess.run(
            [*command, *flags, *map(str, more)],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(temporary)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert not run_dir.exists()
        assert [*temporary.iterdir()] == []
        temporary.rmdir()
        return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr

    return run


def test_a_good_command_passes_all_stages_on_two_nodes_too(rehearse, make_tiny):
    held_out = make_tiny(tied=True) / "eval.jsonl"
    code, found = rehearse("--nodes", 2, "-rt", "boxed", "-ei", 50, "-ed", f"a={held_out}", "--algo", "DAPO")
    assert code == 0, found
    stages = {each["name"]: each for each in found["stages"]}
    names = ["flags", "preparation", "machines", "rewards", "small model", "nodes", "run", "resume", "export"]
    assert [*stages] == names
    # 16 prompts a rollout step and 8 an optimizer step: two steps a weight sync, of which two are taken.
    assert stages["run"]["finding"].startswith("4 steps, ")
    assert stages["resume"]["finding"] == "from step-2 to step-4"
    assert stages["export"]["finding"].startswith("loaded by transformers: Qwen3ForCausalLM")
    assert any(line.startswith("memory, trainer") for line in found["plan"])


def test_an_environment_that_raises_stops_a_command_with_its_own_words(rehearse, tmp_path):
    (tmp_path / "game.py").write_text(
        "class Game:\n    def reset(self, task):\n        raise ConnectionError('no game server at port 4711')\n"
        "    def step(self, action):\n        return [], 0.0, True, {}\n"
    )
    code, found = rehearse("--env", f"{tmp_path}/game.py:Game", "--max-episode-tokens", 512)
    assert code == 1, found
    assert found["stages"][-1]["name"] == "run"
    assert "no game server at port 4711" in found["stages"][-1]["problem"]


def test_a_job_on_a_dataset_is_rehearsed_without_ray(rehearse, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": str(n)}]} for n in range(64)
    ]
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = "-t 2 -tp 2 -tbs 32 --lora-rank 4 --export merged --device cpu"
    code, found = rehearse("-d", tmp_path / "sft.jsonl", job="sft", sizes=sizes)
    assert code == 0, found
    assert "adapter of Qwen3ForCausalLM" in found["stages"][-1]["finding"]
