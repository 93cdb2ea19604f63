"""Replay steps whose loss compares the policy's distribution with a teacher's over the whole vocabulary."""

import pytest
from safetensors.torch import load_file, save_file

from tests.unit.loops.offline_run import run_offline, write_rows
from tests.unit.loops.recorded_run import copy_of, first_named, replay_of, write_metrics, write_steps

DISTILLED = {
    "backend": "transformers",
    "distill_kl": "full",
    "distill_coeff": 0.3,
    "num_generations": 4,
    "inference_batch_size": 2,
    "kl_coeff": 0.05,
    "save_interval": 1,
    "max_logprob_gap": 100.0,
    "max_steps": 3,
    "temperature": 0.8,
}


@pytest.fixture(scope="module")
def own_teacher(teacher_dir, tmp_path_factory):
    """A copy, which a test may change after the run."""
    return copy_of(teacher_dir, tmp_path_factory.mktemp("teacher") / "teacher")


@pytest.fixture(scope="module")
def run_dir(run_in_threads, parity_file, own_teacher):
    fields = {**DISTILLED, "teacher": str(own_teacher), "reward_type": f"{parity_file}:score"}
    return write_metrics(run_in_threads(fields, score=None))


def verdicts(replay, step):
    return {stage.name: stage.verdict for stage in replay.stages(step)}


@pytest.mark.full
def test_a_step_of_rollouts_with_a_teachers_whole_distribution_agrees_in_every_stage(run_dir):
    replay = replay_of(run_dir)
    assert all(record["teacher_kl_mean"] > 0 for record in replay.records.values())
    for step in (1, 3):
        assert set(verdicts(replay, step).values()) == {"agrees"}


@pytest.mark.full
def test_another_teacher_than_the_runs_is_named(run_dir, own_teacher, tmp_path):
    path = own_teacher / "model.safetensors"
    before = path.read_bytes()
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].clone().mul_(1.01)
    try:
        save_file(tensors, path, {"format": "pt"})
        stage, text = first_named(run_dir, 2)
    finally:
        path.write_bytes(before)
    assert (stage, text.split(":")[0]) == ("scores", "teacher_kl_mean")


@pytest.mark.full
@pytest.mark.parametrize("weight", [1.0, pytest.param(0.4, marks=pytest.mark.full)])
def test_steps_of_supervised_fine_tuning_with_a_teacher_are_replayed(model_dir, teacher_dir, tmp_path, weight):
    rows = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "ab"}]} for n in range(8)
    ]
    values = {
        "model": str(model_dir),
        "dataset": write_rows(tmp_path / "train.jsonl", rows),
        "teacher": teacher_dir,
        "distill_weight": weight,
        "device": "cpu",
        "train_batch_size": 4,
        "train_microbatch_size": 2,
        "max_epochs": 2,
        "save_interval": 2,
        "learning_rate": 1e-2,
        "run_dir": str(tmp_path / "run"),
    }
    trace = run_offline("sft", values)
    replay = replay_of(write_steps(trace.run_dir, trace.of("step")))
    for step in (2, 3):
        found = verdicts(replay, step)
        assert "differs" not in found.values()
        assert (found["loss"], found["gradient"]) == ("agrees", "agrees")
