"""Test that disk errors are reported with path and remedy, and that a run without space is refused at once."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coati_rl.config.cli import parse
from coati_rl.disk import check_free_space, disk_errors, disk_problem
from coati_rl.errors import ConfigError, RunError
from coati_rl.processes.run_dir import probe_outputs

ROOT = Path(__file__).resolve().parents[2]
MAIN = """
import sys
from pathlib import Path
import rl_example
code = rl_example.main(sys.argv[2:], Path(sys.argv[1]))
print(code, *[name for name in ("torch", "transformers", "ray", "vllm") if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "No space left on device; free space there (of a run, --keep-checkpoints N deletes older"),
        (errno.EDQUOT, "Disk quota exceeded; free some of your quota there"),
        (errno.EFBIG, "File too large; raise the limit of file sizes (ulimit -f)"),
        (errno.EROFS, "Read-only file system; mount it writable"),
        (errno.EIO, "Input/output error; check that disk"),
    ],
)
def test_a_problem_names_path_cause_and_remedy(number, words):
    error = OSError(number, os.strerror(number))
    assert disk_problem(Path("/run/metrics.jsonl"), error).startswith(f"/run/metrics.jsonl cannot be written: {words}")
    with pytest.raises(RunError, match=r"/run/metrics\.jsonl cannot"), disk_errors(Path("/run/metrics.jsonl")):
        raise error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--run-dir", "file/run"], "--run-dir .*: .*/file cannot be written: Not a directory"),
        (["-sd", "/proc/model"], "--save-dir /proc/model: /proc cannot be written: "),
        (["-esd", "/proc/eval"], "--eval-save-dir /proc/eval: /proc cannot be written: "),
        (["-rsd", "/proc/rollouts"], "--rollout-save-dir /proc/rollouts: /proc cannot be written: "),
    ],
)
def test_where_a_run_is_to_write_is_tried(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=message):
        probe_outputs(parse(flags)[0])
    probe_outputs(parse(["--run-dir", "deep/new/run", "-sd", "model"])[0])
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is made, nothing is left"


def test_a_resumed_run_may_go_on_elsewhere_than_in_the_directory_that_a_new_one_would_have(tmp_path, monkeypatch):
    monkeypatch.chdir("/proc")
    with pytest.raises(ConfigError):
        probe_outputs(parse([])[0])
    probe_outputs(parse(["-cp", str(tmp_path)])[0])
    assert list(tmp_path.iterdir()) == [], "nothing is left"


@pytest.mark.full
def test_a_full_disk_is_found_before_anything_large_is_imported(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["bwrap", "--dev-bind", "/", "/", "--size", "16384", "--tmpfs", str(disk), sys.executable, "-c", MAIN]
    flags = ["-m", "/no/model", "-d", "/no/data.jsonl", "--run-dir", str(disk / "run")]
    done = subprocess.run([*command, str(tmp_path), *flags], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "2\n", done.stderr
    full = "No space left on device; free space there (of a run, --keep-checkpoints N deletes older checkpoints)"
    assert done.stderr == f"rl_example.py: --run-dir {disk}/run: {disk} cannot be written: {full}\n"


def test_a_disk_without_room_for_a_checkpoint_is_refused(tmp_path):
    check_free_space(tmp_path / "not" / "yet", needed=1000)
    with pytest.raises(ConfigError, match=r"/not/yet: a checkpoint takes about 1048576.0 GiB, and .* are free; free s"):
        check_free_space(tmp_path / "not" / "yet", needed=2**50)
