"""Test what a run wrote after the checkpoint that it is resumed from: moved aside, whole, and nothing else."""

import json

import pytest

from coati_rl.checkpoint.rollback import free_name, set_aside_checkpoints, set_aside_records


@pytest.fixture
def write(tmp_path):
    def make(name, *steps, end=""):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"step": step, "text": "½\u2028"}) + "\n" for step in steps) + end)
        return path

    return make


@pytest.fixture
def set_aside(tmp_path):
    def run(step):
        directories = {"rollouts": tmp_path / "rollouts", "evaluation": tmp_path / "eval"}
        set_aside_records(step, tmp_path / "aside", run_dir=tmp_path, **directories)

    return run


def steps_of(path):
    return [json.loads(line)["step"] for line in path.read_text().split("\n") if line]


def test_records_after_the_step_leave_every_file(tmp_path, write, set_aside):
    names = ("metrics.jsonl", "annotations.jsonl", "eval/summary.jsonl")
    names += tuple(f"{each}/steps-000001-000100.jsonl" for each in ("rollouts", "gradients"))
    for name in names:
        write(name, 1, 2, 2, 3, 4)
    set_aside(2)
    for name in names:
        assert steps_of(tmp_path / name) == [1, 2, 2]
        assert steps_of(tmp_path / "aside" / name) == [3, 4]


def test_a_file_without_later_records_is_not_touched(tmp_path, write, set_aside):
    path = write("metrics.jsonl", 1, 2)
    before = path.stat()
    set_aside(2)
    assert path.stat() == before
    assert not (tmp_path / "aside").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_half_a_line_of_a_killed_run_goes_aside_too(tmp_path, write, set_aside):
    path = write("metrics.jsonl", 1, 2, end='{"step": 1, "lo')
    set_aside(2)
    assert steps_of(path) == [1, 2]
    assert (tmp_path / "aside/metrics.jsonl").read_text() == '{"step": 1, "lo'


def test_answers_of_later_evaluations_move_as_files(tmp_path, write, set_aside):
    write("eval/math-step-000002.jsonl")
    write("eval/math-step-000004.jsonl")
    set_aside(2)
    assert [file.name for file in (tmp_path / "eval").iterdir()] == ["math-step-000002.jsonl"]
    assert [file.name for file in (tmp_path / "aside/eval").iterdir()] == ["math-step-000004.jsonl"]


def test_a_run_that_wrote_nothing_has_nothing_to_lose(tmp_path, set_aside):
    set_aside(2)
    set_aside_checkpoints(2, tmp_path / "aside", checkpoints=tmp_path / "checkpoints")
    assert list(tmp_path.iterdir()) == []


def test_later_checkpoints_move_whole(tmp_path):
    for step in (2, 10):
        (tmp_path / f"checkpoints/step-{step}").mkdir(parents=True)
        (tmp_path / f"checkpoints/step-{step}/state.json").write_text(str(step))
    set_aside_checkpoints(2, tmp_path / "aside", checkpoints=tmp_path / "checkpoints")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-2"]
    assert (tmp_path / "aside/checkpoints/step-10/state.json").read_text() == "10"


def test_later_weights_that_are_kept_for_a_replay_move_beside_them(tmp_path):
    for step in (2, 3):
        (tmp_path / f"kept_weights/step-{step}").mkdir(parents=True)
    set_aside_checkpoints(2, tmp_path / "aside", checkpoints=tmp_path / "kept_weights", name="kept_weights")
    assert [path.name for path in (tmp_path / "aside/kept_weights").iterdir()] == ["step-3"]


def test_a_name_that_is_taken_is_numbered(tmp_path):
    names = []
    for _ in range(3):
        path = free_name(tmp_path / "config-step-2.yaml")
        path.write_text("")
        names.append(path.name)
    assert names == ["config-step-2.yaml", "config-step-2-2.yaml", "config-step-2-3.yaml"]
