"""Test a disk that becomes full during a run: one message, and earlier files are complete."""

import os
import shlex
import subprocess
import sys

import pytest

from coati_rl.checkpoint.directory import read_state
from coati_rl.checkpoint.ledger_files import LEDGER, read_ledger
from tests.integration.runs.conftest import ROOT, Run, ended_runs

pytestmark = pytest.mark.full
SCRIPT = """
(until [ "$(cat {run}/metrics.jsonl 2>/dev/null | wc -l)" -ge {steps} ]; do sleep 0.1; done; cat /dev/zero > {disk}/fill) 2>/dev/null &
filling=$!
{command}
code=$?
kill $filling 2>/dev/null
rm -f {disk}/fill
cp -a {run} {out}
exit $code
"""  # noqa: E501


class RunOnASmallDisk(Run):
    """A run whose directory is on a disk of its own, which something else fills after some steps."""

    def __init__(self, arguments: list[str], run_dir, *, megabytes: int, fill_at: int) -> None:
        self.run_dir, disk = run_dir, run_dir.with_suffix(".disk")
        self.output = run_dir.with_suffix(".out")
        disk.mkdir()
        command = [sys.executable, str(ROOT / "rl_example.py"), *arguments, "--run-dir", str(disk / "run")]
        names = {"run": disk / "run", "disk": disk, "out": run_dir, "command": shlex.join(command), "steps": fill_at}
        sandbox = ["bwrap", "--dev-bind", "/", "/", "--size", str(megabytes * 2**20), "--tmpfs", str(disk)]
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [*sandbox, "sh", "-c", SCRIPT.format(**names)],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                start_new_session=True,
            )
        self.family, self.places = {}, None


@pytest.mark.parametrize(("fill_at", "interval"), [(3, 2), (10_000, 1)], ids=["in its steps", "at a checkpoint"])
def test_a_full_disk_ends_a_run_with_path_and_remedy_and_its_checkpoints_stay(
    make_tiny, flags, tmp_path, fill_at, interval
):
    with ended_runs(RunOnASmallDisk, tmp_path) as start:
        job = [*flags(make_tiny(tied=True)), "-b", "fake", "-e", 1000, "--max-steps", 1000, "-si", interval]
        run = start(*job, megabytes=16, fill_at=fill_at)
        assert run.wait() == 1, run.text()
    text = run.text()
    *_, last = text.splitlines()
    assert "Traceback" not in text
    assert last.startswith("rl_example.py: the run failed: ")
    assert f"{tmp_path}/run.disk/run/" in last
    assert "No space left on device" in last and "free space there" in last, "path, cause and remedy"
    newest = max(run.run_dir.glob("checkpoints/step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    state = read_state(newest)
    assert f"; resume from step {state['step']} with: " in last
    assert len(run.records()) >= state["step"], "what is saved is recorded"
    assert [*read_ledger(run.run_dir / LEDGER)], "it is intact up to its last whole frame"
