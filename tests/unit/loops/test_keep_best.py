"""Test in whole runs that the best evaluated checkpoint is kept, named, and found again by a resumed run."""

import json
import shutil

import pytest

from coati_rl.checkpoint.directory import checkpoints_in

EVERY_STEP = {  # a sync, an evaluation and a checkpoint after each of the 4 steps
    "save_interval": 1,
    "eval_interval": 1,
    "inference_batch_size": 2,
    "keep_best": "eval/math/accuracy",
}


@pytest.fixture(scope="module")
def settings(write_prompts):
    return EVERY_STEP | {"eval_dataset": {"math": write_prompts("math", 8)}}


@pytest.fixture(scope="module")
def whole(run_in_threads, settings):
    return run_in_threads(settings)


def best_of(trace):
    """The best step after the first one by the summary, and what the run's directory says."""
    lines = (trace.paths.evaluation / "summary.jsonl").read_text().splitlines()
    values = {line["step"]: line["accuracy"] for line in map(json.loads, lines)}
    assert len(set(values.values())) > 1, "the test needs evaluations that differ"
    expected = max([step for step in values if step > 0], key=lambda step: (values[step], -step))
    record = json.loads((trace.paths.checkpoints / "best.json").read_text())
    assert record == {"step": expected, "metric": "eval/math/accuracy", "value": values[expected]}
    assert (trace.paths.checkpoints / "best").resolve().name == f"step-{expected}"
    return expected


def kept(trace):
    return [path.name for path in checkpoints_in(trace.paths.checkpoints)]


def test_the_best_checkpoint_is_named_and_the_driver_hears_of_each_new_one(whole):
    best = best_of(whole)
    told = whole.of("best")
    assert told[-1]["step"] == best and [event["value"] for event in told] == sorted(e["value"] for e in told)
    assert kept(whole) == ["step-1", "step-2", "step-3", "step-4"]


def test_the_best_is_kept_besides_the_newest(run_in_threads, settings, whole):
    best = best_of(whole)
    assert best < 4, "the test needs a best checkpoint that is not the newest"
    assert kept(run_in_threads(settings | {"keep_checkpoints": 1})) == [f"step-{best}", "step-4"]


def test_a_resumed_run_knows_the_best_of_before(run_in_threads, settings, whole, tmp_path):
    run_dir = tmp_path / "again"
    shutil.copytree(whole.paths.run_dir, run_dir, symlinks=True)
    fields = {"run_dir": str(run_dir), "checkpoint_path": str(run_dir / "checkpoints" / "step-3")}
    trace = run_in_threads(settings | fields | {"keep_checkpoints": 1})
    best = best_of(trace)
    assert best == best_of(whole)
    assert kept(trace) == sorted({f"step-{best}", "step-4"})
