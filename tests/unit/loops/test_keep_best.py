"""Test in whole runs that the best evaluated checkpoint is kept, named, and found again by a resumed run."""

import json
import shutil

import pytest

from coati_rl.checkpoint.directory import checkpoints_in
from coati_rl.errors import RunError
from tests.unit.loops.offline_run import run_offline, write_rows

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


@pytest.mark.full
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


def test_a_job_on_a_dataset_keeps_the_checkpoint_of_its_smallest_loss(model_dir, tmp_path):
    rows = [{"prompt": f"q{n}", "completion": "ab"} for n in range(4)]
    other = [{"prompt": "q", "completion": "xyz"}]
    fields = {
        "model": str(model_dir),
        "dataset": write_rows(tmp_path / "train.jsonl", rows),
        "eval_dataset": write_rows(tmp_path / "held.jsonl", other),  # gets worse, as the answers are other ones
        "device": "cpu",
        "train_batch_size": 2,
        "train_microbatch_size": 2,
        "max_epochs": 2,
        "eval_interval": 1,
        "save_interval": 1,
        "keep_checkpoints": 1,
        "keep_best": "eval/eval/loss",
        "learning_rate": 3e-2,
        "run_dir": str(tmp_path / "run"),
    }
    trace = run_offline("sft", fields)
    losses = {event["step"]: event["metrics"]["loss"] for event in trace.of("evaluation") if event["step"] > 0}
    best = min(losses, key=lambda step: (losses[step], step))
    checkpoints = trace.run_dir / "checkpoints"
    record = json.loads((checkpoints / "best.json").read_text())
    assert record == {"step": best, "metric": "eval/eval/loss", "value": losses[best]}
    assert [path.name for path in checkpoints_in(checkpoints)] == sorted({f"step-{best}", "step-4"})
    assert best < 4, "the test needs a best checkpoint that is not the newest"


def test_a_metric_that_the_evaluations_of_a_job_lack_is_told_with_the_first_of_them(model_dir, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "ab"}])
    fields = {"model": str(model_dir), "dataset": rows, "eval_dataset": rows, "device": "cpu", "train_batch_size": 1}
    fields |= {"eval_interval": 1, "save_interval": 1, "run_dir": str(tmp_path / "run")}
    with pytest.raises(RunError, match=r"--keep-best eval/eval/accuracy: is no metric of the evaluations; use one"):
        run_offline("sft", fields | {"keep_best": "eval/eval/accuracy"})
