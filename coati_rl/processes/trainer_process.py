"""Start a trainer's process on this machine, early if that is possible, and hold what it has told.

A process imports the trainers' libraries and then waits for one line of input, the invitation to call the driver. So
it may start while the driver still reads the job's data.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from coati_rl.config.training import TrainingConfig
from coati_rl.errors import CoatiError, PeerLostError
from coati_rl.processes.actor_process import device_environment
from coati_rl.processes.heartbeats import Heartbeat, end_process
from coati_rl.processes.interrupts import blocked_in_children
from coati_rl.torchrun import num_local, torchrun_world
from coati_rl.types import Device

PROGRAM = "from coati_rl.processes.local_trainer import main; main()"
_END_S = 10.0  # for a killed process to be gone
_GPU_DRIVER = Path("/dev/nvidiactl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spawned:
    """Hold a process that waits for its invitation."""

    process: "subprocess.Popen[str]"
    environment: dict[str, str]  # its variables besides the driver's
    log: Path  # of what it prints before it knows its log

    def kill(self) -> None:
        """End it."""
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)


def spawn(rank: int, environment: dict[str, str], log: Path, *, modules: Sequence[str] = ()) -> Spawned:
    """Start the process of a trainer.

    Args:
        rank: of the trainer.
        environment: variables besides those of this process.
        log: is appended to.
        modules: that it imports while it waits.
    """
    with log.open("ab") as output, blocked_in_children():
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(os.getpid()), *modules],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
            text=True,
        )
    return Spawned(process=process, environment=environment, log=log)


def environment_of(
    config: TrainingConfig, rank: int, device: Device, precision: str, own: dict[str, str]
) -> dict[str, str]:
    """Return the variables of a trainer's process besides the driver's. `own`: those of its class."""
    num_slots = num_local(config.parallel.num_trainers)
    num_threads = max(1, len(os.sched_getaffinity(0)) // num_slots)
    return {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": str(num_threads),
        "TOKENIZERS_PARALLELISM": "false",
        **({"CUDA_VISIBLE_DEVICES": _gpu(rank % num_slots)} if device == "cuda" else {}),
        **device_environment(device, precision),
        **own,
    }


@contextmanager
def early_trainers(
    config: TrainingConfig,
    environment: Callable[[TrainingConfig, Device], dict[str, str]],
    scratch: Path,
    *,
    modules: Sequence[str],
) -> Iterator[list[Spawned]]:
    """Start the trainers of a job on this machine's CPU before its data are read, and end them with the block.

    Args:
        config: of the job. What it leaves open may turn out otherwise; then other processes take their place.
        environment: returns the variables of the trainers' class.
        scratch: for what they print.
        modules: that they import.
    Yields: them, by rank; none where GPUs or Ray may be needed.
    """
    spawned: list[Spawned] = []
    is_on_cpu = config.cluster.device == "cpu" or (config.cluster.device == "auto" and not _GPU_DRIVER.exists())
    if is_on_cpu and not config.needs_ray:
        for rank in range(config.parallel.num_trainers if torchrun_world() is None else 1):
            variables = environment_of(config, rank, "cpu", "", environment(config, "cpu"))
            spawned.append(spawn(rank, variables, scratch / f"trainer-{rank}.log", modules=modules))
    try:
        yield spawned
    finally:
        for each in spawned:
            each.kill()


@dataclass(slots=True)
class TrainerProcess:
    """Implement `Member` with a process of this machine, or with one that torchrun has started."""

    name: str
    spawned: Spawned | None  # None: torchrun has started it, and ends it
    is_started: bool = False
    num_beats: int = 0
    beat: Heartbeat | None = None  # the last one
    outcome: int | CoatiError | None = None  # what it has returned or raised

    @property
    def handle(self) -> "TrainerProcess":
        """Return this object, which has the heartbeats."""
        return self

    def is_done(self) -> bool:
        return self.outcome is not None or (self.spawned is not None and self.spawned.process.poll() is not None)

    def result(self) -> int:
        if self.outcome is None:
            raise PeerLostError(f"{self.name} died: {self._how_it_ended()}")
        if isinstance(self.outcome, CoatiError):
            raise self.outcome
        return self.outcome

    def invite(self, invitation: str) -> None:
        """Let a process that the driver has started begin."""
        pipe = self.spawned.process.stdin if self.spawned is not None else None
        assert pipe is not None  # noqa: S101  as it is started
        with suppress(BrokenPipeError), pipe:  # it has ended: found by `is_done`
            pipe.write(f"{invitation}\n")

    def end(self) -> None:
        """Kill the process, with what it has started."""
        if self.spawned is None:
            return
        if self.spawned.process.poll() is None and self.beat is not None:
            end_process(self.beat.pid, self.beat.started_at)
        self.spawned.kill()

    def _how_it_ended(self) -> str:
        assert self.spawned is not None  # noqa: S101  torchrun's is done when it has reported its end
        code = self.spawned.process.returncode
        if code >= 0:
            printed = self.spawned.log.read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line for line in reversed(printed) if line.strip()), "")
            return f"exit code {code}{': ' if last else ''}{last}"
        name = signal.Signals(-code).name
        hint = " (the system does so when memory runs out)" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"


def newer_beat(asked: tuple[TrainerProcess, int]) -> Heartbeat | None:
    """Return the last heartbeat of a process if it has come since it had told so many."""
    trainer, num_before = asked
    return trainer.beat if trainer.num_beats > num_before else None


def _gpu(rank: int) -> str:
    """Return the name of a trainer's GPU among those that this process may use."""
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return names[rank] if names else str(rank)
