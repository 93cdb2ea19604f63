"""Test that a checkpoint of an earlier format resumes, with its finished rollouts, like its own run."""

import json
import shutil
from pathlib import Path

import pytest

from coati_rl.checkpoint.format import FORMAT_VERSION
from tests.unit.loops.test_resume_ahead import DIFFERS, K1, slow_reward

DATA = Path(__file__).parents[2] / "data"
# Numbers of arithmetic in float32, which another processor rounds otherwise.
ROUNDED = {"loss", "entropy_mean", "ratio_max", "grad_norm", "learning_rate"}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """A copy of the run directory of version 1, in which its own path is written."""
    run_dir = tmp_path_factory.mktemp("earlier") / "run"
    shutil.copytree(DATA / "checkpoint_v1", run_dir)
    settings = run_dir / "config.yaml"
    settings.write_text(settings.read_text().replace("ROOT", str(run_dir)))
    return run_dir


@pytest.fixture(scope="module")
def resumed(earlier, run_in_threads, tmp_path_factory):
    fields = {"n_behind": 1, "save_interval": 1, "kl_coeff": 0.0, **K1}
    checkpoint = str(earlier / "checkpoints" / "step-3")
    paths = {"model": checkpoint, "checkpoint_path": checkpoint, "dataset": str(earlier / "data.jsonl")}
    run_dir = tmp_path_factory.mktemp("resumed") / "run"
    return run_in_threads({**fields, **paths, "run_dir": str(run_dir)}, score=slow_reward)


def records(path):
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def test_the_checkpoint_is_of_the_version_before(earlier):
    assert "format_version" not in json.loads((earlier / "checkpoints/step-3/state.json").read_text())


def test_its_finished_rollouts_are_trained_and_not_sampled_again(resumed):
    assert resumed.prepared.resume.changes == ()
    untrained = [finished.group.prompt.uid for finished in resumed.prepared.resume.untrained.finished]
    assert untrained == ["train-4.0", "train-8.0"]
    assert sorted(resumed.responses) == ["train-5.0", "train-6.0", "train-7.0", "train-9.0"]


def test_its_samples_and_records_are_those_of_the_run_that_was_not_interrupted(resumed, earlier):
    (file,) = resumed.paths.rollouts.iterdir()
    whole = records(earlier / "rollouts.jsonl")
    assert [{key: line[key] for key in whole[0]} for line in records(file)] == whole
    for record, expected in zip(resumed.steps, records(earlier / "steps.jsonl"), strict=True):
        for key in set(expected) - DIFFERS - ROUNDED:
            assert record[key] == expected[key], key
        for key in ROUNDED:
            assert record[key] == pytest.approx(expected[key], rel=1e-4), key


def test_the_checkpoints_that_it_writes_are_of_the_newest_version(resumed):
    state = json.loads((resumed.paths.checkpoints / "step-6" / "state.json").read_text())
    assert state["format_version"] == FORMAT_VERSION == 2
