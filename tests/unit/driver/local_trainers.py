"""Trainers for the tests of `local_actors`, which are made in processes of their own."""

import os
import signal
import sys
import time

from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError
from coati_rl.work import FinishWork


class Trainer:
    """Take work until it is finished; the name of the run's directory says what happens on the way."""

    @staticmethod
    def environment(config: TrainingConfig, device: str) -> dict[str, str]:
        return {"COATI_TEST": "1"}

    def __init__(self, rank, config, context, *, run_dir, checkpoint_dir, resume_dir) -> None:
        self.rank, self.context, self.way = rank, context, run_dir.name
        sys.stderr.write(f"trainer {rank} has {os.environ['OMP_NUM_THREADS']} threads\n")

    def open_rendezvous(self) -> str:
        return "the store of rank 0"

    def start(self, rendezvous: str) -> float:
        assert rendezvous == "the store of rank 0" and os.environ["COATI_TEST"] == "1"
        if self.way == "refused":
            raise ConfigError("--model m: has no head")
        if self.way == "exits":
            sys.stderr.write("no room for the model\n")
            sys.stderr.flush()
            os._exit(7)
        return 0.0

    def run(self, coordinator, namespace: str) -> int:
        if self.way == "fails":
            raise ValueError("a shape is\nwrong")
        index = 0
        while not isinstance(coordinator.next_work(index, rank=self.rank, timeout_s=5.0), FinishWork):
            index += 1
        if self.way == "killed" and self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.way in ("killed", "sleeps"):
            time.sleep(600)
        coordinator.report_step(index, {"rank": self.rank, "pid": os.getpid()})
        return index
