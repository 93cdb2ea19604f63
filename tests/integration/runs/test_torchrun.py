"""Run jobs on a dataset as torchrun starts them: a trainer in each of its processes, on one node and on two."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.integration.runs.test_offline import JobRun, job_flags, rows, tensors  # noqa: F401, fixtures
from tests.integration.runs.two_nodes import ADDRESSES, TwoNamespaces

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

TORCHRUN = ("-m", "torch.distributed.run")
WHERE = "--nproc-per-node"


class TorchrunRun(JobRun):
    """A job that two processes of torchrun run."""

    program = (*TORCHRUN, WHERE, "2", "-m", "consumer")

    def left_over(self, within_s: float = 15) -> list[psutil.Process]:
        """Remembered processes that are still there; torchrun leaves files of its own."""
        return psutil.wait_procs(self.family.values(), timeout=within_s)[1]


@pytest.fixture(scope="module")
def run_class():
    return JobRun


@pytest.fixture
def start_torchrun(tmp_path):
    """Flags of a job -> its run; one that a failing test leaves running is ended."""
    runs = []

    def start(*arguments):
        runs.append(TorchrunRun([str(each) for each in arguments], tmp_path / "torchrun"))
        return runs[-1]

    yield start
    for run in runs:
        run.end()


def without_t(flags):
    """The flags, for processes whose number torchrun has chosen."""
    at = flags.index("-t")
    return [*flags[:at], *flags[at + 2 :]]


@pytest.mark.parametrize("job", ["sft", "dpo", "rm", "kto"])
def test_the_weights_are_those_of_the_job_that_the_command_line_starts(start_run, start_torchrun, job_flags, job):  # noqa: F811
    flags = job_flags(job, trainers=2, dp=2, epochs=1)
    alone, by_torchrun = start_run(*flags), start_torchrun(*without_t(flags))
    assert alone.wait() == 0, alone.text()
    assert by_torchrun.wait() == 0, by_torchrun.text()
    assert by_torchrun.text().count("done: ") == 1, "one of the processes speaks"
    assert tensors(by_torchrun, 4) == tensors(alone, 4) != {}
    ours, theirs = ([record["loss"] for record in run.records()] for run in (by_torchrun, alone))
    assert ours == theirs
    assert by_torchrun.left_over() == []
    assert not list(by_torchrun.run_dir.glob(".torchrun*")), "the invitation is removed"


def test_a_signal_to_torchrun_saves_a_checkpoint_from_which_torchrun_goes_on(start_torchrun, job_flags):  # noqa: F811
    flags = without_t(job_flags("sft", trainers=2, dp=2, epochs=1000))
    run = start_torchrun(*flags, "-si", 10000)
    run.wait_for_step(3)
    run.processes()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() != 0
    step = len(run.records())
    assert f"; resume from step {step} with: " in run.text(), run.text()
    resumed = TorchrunRun([*map(str, flags), "-cp", str(run.run_dir), "--max-steps", str(step + 2)], run.run_dir)
    assert resumed.wait() == 0, resumed.text()
    assert [record["step"] for record in resumed.records()] == list(range(1, step + 3))
    assert run.left_over() == []


@pytest.mark.parametrize("which", ["the driver", "a trainer"])
def test_a_killed_process_ends_all_of_them(start_torchrun, job_flags, which):  # noqa: F811
    run = start_torchrun(*without_t(job_flags("sft", trainers=2, dp=2, epochs=1000)))
    run.wait_for_step(2)
    run.processes()
    children = psutil.Process(run.process.pid).children()
    (trainer,) = (each for each in children if "local_trainer" in " ".join(each.cmdline()))
    (first,) = (each for each in children if each != trainer)
    (first.children()[0] if which == "the driver" else trainer).kill()
    assert run.wait() == 1, run.text()
    assert run.left_over() == []


def test_another_number_of_trainers_is_refused_once_with_the_remedy(start_torchrun, job_flags):  # noqa: F811
    run = start_torchrun(*job_flags("sft", trainers=3))
    assert run.wait() == 1
    assert run.text().count("-t 3: torchrun has started 2 processes, a trainer each; use -t 2") == 1
    assert not run.run_dir.exists()


def test_a_dry_run_prints_one_plan_and_ends(start_torchrun, job_flags):  # noqa: F811
    run = start_torchrun(*without_t(job_flags("sft")), "--dry-run")
    assert run.wait() == 0, run.text()
    assert run.text().count("devices ") == 1


@pytest.fixture
def namespaces():
    """Two nodes that share only files."""
    world = TwoNamespaces()
    yield world
    world.end()


def test_two_nodes_have_the_weights_of_one(namespaces, start_run, job_flags, tmp_path: Path) -> None:  # noqa: F811
    flags = job_flags("sft", trainers=2, dp=2, epochs=1)
    alone = start_run(*flags)
    assert alone.wait() == 0, alone.text()
    run_dir = tmp_path / "two"
    job = [*TORCHRUN, "--nnodes", "2", WHERE, "1", "--master-addr", ADDRESSES[0], "--master-port", "29511"]
    given = [*map(str, without_t(flags)), "--run-dir", str(run_dir)]
    started = [
        subprocess.Popen(
            [*namespaces.enter(node), sys.executable, *job, "--node-rank", str(node), "-m", "consumer", *given],
            env=namespaces.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in (0, 1)
    ]
    said = [each.communicate(timeout=600)[0] for each in started]
    assert [each.returncode for each in started] == [0, 0], said
    assert "done: " in said[0] and "done: " not in said[1]
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["loss"] for record in records] == [record["loss"] for record in alone.records()]
    saved = {path.name: path.read_bytes() for path in (run_dir / "checkpoints" / "step-4").glob("*.safetensors")}
    assert saved == tensors(alone, 4) != {}
