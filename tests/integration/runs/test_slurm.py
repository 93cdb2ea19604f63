"""Submit scripts/slurm.sh to the real SLURM: two nodes, a Ray cluster, a run; its exit code, signals and rests."""

import shutil
import time

import pytest

from tests.integration.runs.conftest import ROOT
from tests.integration.runs.slurm_cluster import PROGRAMS, SlurmCluster
from tests.integration.runs.two_nodes import ADDRESSES

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

JOB_S = 500.0


@pytest.fixture(scope="module")
def cluster():
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    assert not missing, f"missing: {', '.join(missing)}; apt install slurm-wlm munge (docs/install.md)"
    world = SlurmCluster()
    yield world
    world.end()


class Job:
    """A job of the script."""

    def __init__(self, cluster, arguments, run_dir, *, cwd=ROOT):
        self.cluster, self.run_dir, self.output = cluster, run_dir, run_dir.with_suffix(".out")
        cluster.environment |= {"COATI_HEAD_ADDRESS": ADDRESSES[0], "PYTHONPATH": str(ROOT)}
        script = str(ROOT / "scripts" / "slurm.sh")
        flags = [str(each) for each in (*arguments, "--run-dir", run_dir, "--device", "cpu")]
        submit = ("sbatch", "--parsable", "--nodes=2", f"--output={self.output}", script)
        self.number = cluster.call(*submit, *flags, cwd=cwd).strip()

    def state(self):
        """Such as RUNNING, and the exit code and signal."""
        facts = dict(
            fact.split("=", 1)
            for fact in self.cluster.call("scontrol", "show", "job", "--oneliner", self.number).split()
            if "=" in fact
        )
        return facts["JobState"], facts["ExitCode"]

    def text(self):
        return self.output.read_text() if self.output.exists() else ""

    def num_steps(self):
        path = self.run_dir / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def wait(self, until):
        deadline = time.monotonic() + JOB_S
        while not until():
            assert time.monotonic() < deadline, f"{self.state()}\n{self.text()}\n{self.cluster.logs()}"
            time.sleep(1)

    def end(self):
        """Wait for the end; return the state and the exit code, when nothing of the job is left."""
        self.wait(lambda: self.state()[0] not in ("PENDING", "RUNNING", "COMPLETING"))
        world, names = self.cluster.world, ("raylet", "ray::", "rl_example.py")
        self.wait(lambda: not any(world.processes(node, name) for node in (0, 1) for name in names))
        return self.state()


def test_a_run_spreads_over_the_nodes_and_its_exit_code_is_the_jobs(cluster, make_tiny, flags, tmp_path):
    sizes = flags(make_tiny(tied=True), trainers=2, inferencers=2)
    job = Job(cluster, [*sizes, "-b", "transformers", "--max-steps", 2], tmp_path / "run")
    job.wait(lambda: job.num_steps() >= 1)
    actors = [len(cluster.world.processes(node, "ray::ProducerActor")) for node in (0, 1)]
    actors += [len(cluster.world.processes(node, "ray::TrainerActor")) for node in (0, 1)]
    assert sum(actors) == 4 and all(sum(actors[node::2]) == 2 for node in (0, 1)), actors
    assert job.end() == ("COMPLETED", "0:0"), job.text()
    assert job.num_steps() == 2
    assert (job.run_dir / "checkpoints" / "step-2" / "manifest.json").is_file()
    assert "rl_example.py ended with exit code 0" in job.text()
    assert not list((ROOT / "runs").glob(f".slurm-{job.number}-*")), "the token is removed"


def test_a_mistake_in_the_flags_is_the_jobs_exit_code(cluster, make_tiny, flags, tmp_path):
    job = Job(cluster, [*flags(make_tiny(tied=True)), "-ptp", 64], tmp_path / "run")
    assert job.end() == ("FAILED", "2:0"), job.text()


def test_a_job_that_was_not_submitted_from_the_root_says_so_at_once(cluster, tmp_path):
    job = Job(cluster, [], tmp_path / "run", cwd=tmp_path)
    assert job.end() == ("FAILED", "2:0"), job.text()
    assert "call sbatch in the root of the repository" in job.text()


def test_the_signal_before_the_time_limit_saves_a_checkpoint(cluster, make_tiny, flags, tmp_path):
    sizes = flags(make_tiny(tied=True))
    job = Job(cluster, [*sizes, "-b", "transformers", "-e", 1000, "--max-steps", 1000], tmp_path / "run")
    job.wait(lambda: job.num_steps() >= 2)
    cluster.call("scancel", "--batch", "--signal=INT", job.number)
    assert job.end() == ("FAILED", "130:0"), job.text()
    assert f"; resume from step {job.num_steps()} with: " in job.text()
    assert (job.run_dir / "checkpoints" / f"step-{job.num_steps()}" / "manifest.json").is_file()
