"""Start trainers from two processes: forks that have imported everything, since the imports take 6 s each.

On real GPUs, which cannot be used in a fork, they are processes of their own.

Neighbouring ranks come from different servers, so that the order of their sets differs, as between trainers of a run.

python -m tests.integration.consumer.trainer_server CONNECTION_FD | JOB_FILE
"""

import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
from bench.weight_sync import nccl_environment
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from coati_rl.processes.imports import uncollected
from coati_rl.types import Device
from consumer.parallel.process_group import destroy_process_group, init_process_group
from consumer.parallel.store_location import StoreLocation
from tests.gpu.devices import IS_EMULATED

ROOT = Path(__file__).resolve().parents[3]
OF_TESTS = (
    "gradient_process",
    "lifecycle_process",
    "replay_process",
    "fault_process",
    "sft_process",
    "reward_process",
    "reward_model_process",
)
# Each trainer would import these when it makes its backend, in 1.5 s of CPU time.
OF_BACKENDS = (
    "consumer.parallel.fsdp",
    "consumer.parallel.hybrid",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mistral", "qwen2", "qwen3")),
)
IMPORTED = (*OF_BACKENDS, *(f"tests.integration.consumer.{name}" for name in OF_TESTS))
LAUNCH_TIMEOUT_S = 1800
TIMEOUT_S = 60.0  # of a collective


class Job(NamedTuple):
    """Describe a group of trainers, each of which runs target(rank, *arguments)."""

    target: Callable[..., None]  # of a module, so that it can be pickled
    arguments: tuple[object, ...]
    world_size: int
    rendezvous: StoreLocation
    output_dir: Path
    device: Device

    def output_of(self, rank: int) -> Path:
        return self.output_dir / f"rank{rank}.txt"


class Ended(NamedTuple):
    """A trainer that has ended."""

    exit_code: int  # negative: the signal that killed it
    output: str


class TrainerServers:
    """The two servers, as seen from a test; they start with the first launch."""

    def __init__(self, output_dir: Path, device: Device = "cpu") -> None:
        self._output_dir = output_dir
        self._device: Device = device
        self._servers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._num_launched = 0

    def launch(self, target: Callable[..., None], *arguments: object, world_size: int) -> list[Ended]:
        """Run a group of trainers to its end. Returns: one result per rank, whatever the exit codes."""
        if not self._servers:
            self._servers = [_start(self._device) for _ in range(2)]
        self._num_launched += 1
        rendezvous = StoreLocation(address="127.0.0.1", file=self._output_dir / f"store-{self._num_launched}")
        job = Job(target, arguments, world_size, rendezvous, self._output_dir, self._device)
        for index, (_, connection) in enumerate(self._servers):
            connection.send((job, range(world_size)[index::2]))
        exit_codes: dict[int, int] = {}
        try:
            for _, connection in self._servers:
                if not connection.poll(LAUNCH_TIMEOUT_S):
                    raise TimeoutError(f"trainers still run after {LAUNCH_TIMEOUT_S} s")
                exit_codes |= connection.recv()
        finally:
            if len(exit_codes) < world_size:  # nothing of this launch may meet the next
                self.close()
        return [Ended(exit_codes[rank], job.output_of(rank).read_text()) for rank in range(world_size)]

    def launch_and_check(self, target: Callable[..., None], *arguments: object, world_size: int) -> None:
        """The same, and all must end well."""
        for rank, ended in enumerate(self.launch(target, *arguments, world_size=world_size)):
            assert ended.exit_code == 0, f"rank {rank} of {world_size}:\n{ended.output}"

    def close(self) -> None:
        for server, connection in self._servers:
            connection.close()
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
        self._servers = []


def _start(device: Device) -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = Pipe()
    command = [sys.executable, "-m", __name__, str(theirs.fileno())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # ColossalAI takes a GPU that it sees
    server = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()], start_new_session=True)
    theirs.close()
    return server, ours


def _start_trainer(job: Job, rank: int) -> int:
    """Returns: the process id of the trainer."""
    if job.device == "cuda" and not IS_EMULATED:
        file = job.output_dir / f"job{rank}.pickle"
        file.write_bytes(pickle.dumps((job, rank)))
        with job.output_of(rank).open("wb") as output:
            command = [sys.executable, "-m", __spec__.name, str(file)]
            return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT).pid
    pid = os.fork()
    if not pid:
        _train(job, rank)
    return pid


def _train(job: Job, rank: int) -> None:
    """Be a trainer, and exit."""
    exit_code = 1
    try:
        output = os.open(job.output_of(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output, stream.fileno())
        cpus = sorted(os.sched_getaffinity(0))
        if job.world_size > len(cpus):  # a third faster: a collective wakes several threads of a trainer in turn
            os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
        if job.device == "cpu":  # torch's own keeps three formatted stacks for devices that are not there, in 10 ms
            torch.manual_seed = torch.default_generator.manual_seed
        if job.device == "cuda":  # the imports have asked for GPUs; emulated ones can be used in a fork all the same
            torch.cuda._is_in_bad_fork = lambda: False
            os.environ |= nccl_environment(rank)
        init_process_group(
            rank=rank,
            world_size=job.world_size,
            rendezvous=job.rendezvous,
            timeout_s=TIMEOUT_S,
            seed=0,
            device=job.device,
        )
        job.target(rank, *job.arguments)
        destroy_process_group()
        exit_code = 0
    finally:
        if exit_code:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(exit_code)


def main() -> None:
    """Start trainers until the test's end of the connection is closed, or be one."""
    if not sys.argv[1].isdecimal():
        _train(*pickle.loads(Path(sys.argv[1]).read_bytes()))
    connection = Connection(int(sys.argv[1]))
    with uncollected():
        for name in IMPORTED:
            importlib.import_module(name)
        get_checkpoint_conversion_mapping("qwen3")  # made when a process first loads a model
    gc.freeze()  # so that trainers collect what is their own in milliseconds
    with suppress(EOFError):
        while True:
            job, ranks = connection.recv()
            trainers = {rank: _start_trainer(job, rank) for rank in ranks}
            connection.send({rank: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for rank, pid in trainers.items()})


if __name__ == "__main__":
    main()
