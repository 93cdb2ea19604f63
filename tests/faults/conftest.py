"""Run real actors, engines, transfers and signals with a fault, and check what is left afterwards."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.integration.runs.conftest import ROOT, Run, flags, make_tiny, start_run, start_shared_run
from tests.integration.runs.places import OwnPlaces

__all__ = ["flags", "make_tiny", "start_run", "start_shared_run"]  # fixtures

HERE = Path(__file__).parent
HEARTBEAT_S, PHASE_S = 20, 8  # a new process imports for 8 to 13 CPU seconds on a slow machine
LOSS = """
import time
from pathlib import Path

def policy_loss(logprobs, old_logprobs, advantages, micro_batch):
    import torch.distributed as dist
    while (cue := Path({cue!r})).exists() and cue.read_text() == str(dist.get_rank()):
        time.sleep(0.1)
    return -(logprobs - old_logprobs).exp() * advantages
"""

Faults = dict[str, str] | None


def endless_run(directory: Path) -> tuple[Path, list[object]]:
    """Return the file that makes the loss of the trainer whose rank it holds hang, and the flags of a long run."""
    cue, loss = directory / "cue", directory / "own_loss.py"
    loss.write_text(LOSS.format(cue=str(cue)))
    deadlines = ["--heartbeat-timeout-s", HEARTBEAT_S, "--phase-timeout-s", PHASE_S]
    return cue, ["-e", 1000, "--max-steps", 1000, *deadlines, "--policy-loss", f"{loss}:policy_loss"]


class FaultyRun(Run):
    """A run whose processes are known by what is in their environment, wherever they have gone."""

    def __init__(
        self,
        arguments: list[str],
        run_dir: Path,
        *,
        exports: Faults = None,
        stagings: Faults = None,
        signals: Sequence[dict] = (),
    ) -> None:
        self.run_dir = run_dir
        self.family = {}
        self.output = run_dir.with_suffix(".out")
        self.places = OwnPlaces(run_dir)
        faults = {"exports": exports or {}, "stagings": stagings or {}, "signals": list(signals)}
        self._mark = json.dumps({**faults, "run": str(run_dir)})
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]),
            "COATI_FAULTS": self._mark,
        }
        self.places.forget_ours(environment)
        command = [sys.executable, str(HERE / "faulty_run.py"), *arguments, "--run-dir", str(run_dir)]
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                self.places.command(command),
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
            )

    def log(self, name: str) -> str:
        """Return the log of an actor."""
        return (self.run_dir / "logs" / f"{name}.log").read_text()

    def syncs(self) -> list[dict]:
        """syncs.jsonl."""
        return [json.loads(line) for line in (self.run_dir / "syncs.jsonl").read_text().split("\n")[:-1]]

    def rollouts(self) -> list[dict]:
        """All lines of rollouts/*.jsonl."""
        return [json.loads(line) for path in (self.run_dir / "rollouts").iterdir() for line in path.open()]

    def timeline(self, name: str) -> list[dict]:
        """Return the records of an actor's timeline."""
        lines = (self.run_dir / "timeline" / f"{name}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if line]  # the first one is empty

    def left_over(self, within_s: float = 15) -> list[object]:
        """Processes, temporary files and shared memory that outlive the run."""
        deadline = time.monotonic() + within_s
        while (left := [*self._processes(), *self.places.left_over()]) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def _processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_of_this_run(process)]

    def _is_of_this_run(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("COATI_FAULTS") == self._mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:  # it has ended, or is another user's
            return False


@pytest.fixture(scope="session")
def run_class():
    """Runs in this folder take faults next to their flags."""
    return FaultyRun
