"""Submit runs with `ray job submit`: the code is uploaded, packages are the job's, the token is asked for."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from tests.integration.runs.conftest import ROOT
from tests.integration.runs.two_nodes import ADDRESSES, TwoNamespaces

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

BIN = Path(sys.executable).parent
START_S, JOB_S = 300.0, 900.0
# Fails where the code is not the uploaded one, or the job's own package is missing.
REWARD = """
import coati_rl
import halves


def score(response, ground_truth):
    assert "working_dir_files" in coati_rl.__file__, coati_rl.__file__
    return halves.HALF if ground_truth in response else 0.0
"""


@pytest.fixture(scope="module")
def packages():
    """What Ray's dashboard needs."""
    script = ROOT / "scripts" / "extra_packages.sh"
    done = subprocess.run([script, sys.executable, "ray-jobs"], capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the working tree, with a reward of the user's and nothing that was installed."""
    folder = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.splitlines()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    (folder / "own_reward.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A package that no index has."""
    path = tmp_path_factory.mktemp("wheel") / "halves-1.0-py3-none-any.whl"
    about = "halves-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("halves.py", "HALF = 0.5\n")
        file.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: halves\nVersion: 1.0\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")
    return path


@pytest.fixture(scope="module")
def head(packages):
    """Call a command on a cluster's head, which asks for a token."""
    world = TwoNamespaces()
    scratch = Path(tempfile.mkdtemp(prefix="job-"))
    token = scratch / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    environment = {
        **world.environment,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": packages,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
    }

    def call(*command, timeout_s, cwd=scratch, **more):
        return subprocess.run(
            [*world.enter(0), "sh", "-c", 'cd "$0" && exec "$@"', str(cwd), *map(str, command)],
            env={**environment, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            text=True,
        )

    sizes = ("--num-cpus=4", "--num-gpus=0", f"--object-store-memory={100 * 2**20}", f"--temp-dir={scratch}/ray")
    where = (f"--node-ip-address={ADDRESSES[0]}", "--port=6379", "--dashboard-host=127.0.0.1")
    started = call("ray", "start", "--head", *where, *sizes, timeout_s=START_S)
    assert started.returncode == 0, started.stdout
    yield call
    world.end()
    shutil.rmtree(scratch, ignore_errors=True)


def submitted(head, clone, runtime_env, *entrypoint, **more):
    """Submit from the copy, and wait for the end."""
    address = ("--address", "http://127.0.0.1:8265", "--working-dir", ".")
    command = ("ray", "job", "submit", *address, "--runtime-env-json", json.dumps(runtime_env), "--", *entrypoint)
    return head(*command, timeout_s=JOB_S, cwd=clone, **more)


def test_a_run_is_submitted_with_its_code_and_packages(head, clone, wheel, make_tiny, flags, tmp_path):
    run_dir = tmp_path / "run"
    sizes = [*flags(make_tiny(tied=True)), "-rt", "own_reward.py:score", "-b", "transformers", "--max-steps", 2]
    runtime_env = {"pip": {"packages": [str(wheel)], "pip_install_options": ["--no-index"]}}
    done = submitted(
        head, clone, runtime_env, "python", "rl_example.py", *sizes, "--device", "cpu", "--run-dir", run_dir
    )
    assert done.returncode == 0, done.stdout
    assert "joins the Ray cluster of this job" in done.stdout
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    assert {record["reward_mean"] <= 0.5 for record in records} == {True}
    assert (run_dir / "checkpoints" / "step-2" / "model.safetensors").is_file()


def test_a_mistake_in_the_flags_fails_the_job_with_its_message(head, clone, make_tiny, flags, tmp_path):
    sizes = [*flags(make_tiny(tied=True)), "-b", "transformers", "-ptp", 2, "--device", "cpu"]
    done = submitted(head, clone, {}, "python", "rl_example.py", *sizes, "--run-dir", tmp_path / "run")
    assert done.returncode != 0
    assert "--producer-tensor-parallel-size 2 without --backend vllm: has no effect" in done.stdout
    assert "Job entrypoint command failed with exit code 2" in done.stdout, done.stdout


def test_without_the_token_nothing_is_submitted(head, clone):
    done = submitted(head, clone, {}, "true", RAY_AUTH_MODE="disabled")
    assert done.returncode != 0
    assert "Unauthorized" in done.stdout or "401" in done.stdout, done.stdout
