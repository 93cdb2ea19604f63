"""Rollouts as JSONL, trained or not."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from coati_rl.errors import RunError
from coati_rl.observability.rollouts import RolloutRecorder
from coati_rl.types import Completion, Prompt, RolloutGroup, Score


@pytest.fixture
def group():
    completion = Completion(
        token_ids=np.array([5, 6], dtype=np.int32),
        logprobs=np.zeros(2, dtype=np.float32),
        policy_versions=np.array([2, 4], dtype=np.int32),
        finish_reason="stop",
        text="½ — \\boxed{4}\n",
    )
    empty = Completion(
        token_ids=np.array([], dtype=np.int32),
        logprobs=np.array([], dtype=np.float32),
        policy_versions=np.array([], dtype=np.int32),
        finish_reason="abort",
        text="",
    )
    return RolloutGroup(
        lease_id=0,
        producer_id=1,
        prompt=Prompt(uid="train-3.0", token_ids=(1,), ground_truth="4", text="2+2?"),
        temperature=1.0,
        completions=(completion, empty),
        scores=(
            Score(reward=1.0, answer_correct=True, format_valid=True, verdict="ok"),
            Score(reward=math.nan, answer_correct=False, format_valid=False, verdict="invalid", detail="timed out"),
        ),
    )


def first_only(group):
    return np.arange(len(group.scores)) == 0


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_sample_is_a_line_with_what_a_person_asks_for(tmp_path, group):
    RolloutRecorder(tmp_path / "rollouts").write(7, [group], is_trained=first_only)
    first, second = lines_of(tmp_path / "rollouts/steps-000001-000100.jsonl")
    assert first == {
        "step": 7,
        "uid": "train-3.0",
        "sample": 0,
        "producer": 1,
        "prompt": "2+2?",
        "gt_answer": "4",
        "response": "½ — \\boxed{4}\n",
        "num_tokens": 2,
        "finish_reason": "stop",
        "policy_versions": [2, 4],
        "reward": 1.0,
        "answer_correct": True,
        "format_valid": True,
        "verdict": "ok",
        "detail": "",
        "is_trained": True,
    }
    assert (second["sample"], second["policy_versions"], second["verdict"]) == (1, [], "invalid")
    assert second["is_trained"] is False
    assert second["reward"] is None, "a reward without meaning may be no number, which JSON cannot say"


def test_a_full_disk_is_told_with_path_and_remedy(tmp_path, group):
    path = tmp_path / "steps-000001-000100.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(RunError, match=f"{path} cannot be written: No space left on device; free space there"):
        RolloutRecorder(tmp_path).write(7, [group], is_trained=first_only)


@pytest.mark.parametrize(
    ("step", "name"), [(1, "steps-000001-000100"), (100, "steps-000001-000100"), (101, "steps-000101-000200")]
)
def test_a_file_holds_a_hundred_steps(tmp_path, group, step, name):
    RolloutRecorder(tmp_path).write(step, [group], is_trained=first_only)
    assert [path.stem for path in tmp_path.iterdir()] == [name]


def test_a_later_step_is_appended(tmp_path, group):
    recorder = RolloutRecorder(tmp_path)
    recorder.write(1, [group], is_trained=first_only)
    recorder.write(2, [group, group], is_trained=first_only)
    assert [line["step"] for line in lines_of(tmp_path / "steps-000001-000100.jsonl")] == [1, 1, 2, 2, 2, 2]


def test_a_reward_of_several_parts_is_written_with_them(tmp_path, group):
    scores = [replace(score, breakdown={"boxed": 1.0, "mine.score": math.inf}) for score in group.scores]
    RolloutRecorder(tmp_path).write(1, [replace(group, scores=tuple(scores))], is_trained=first_only)
    lines = lines_of(tmp_path / "steps-000001-000100.jsonl")
    assert [line["breakdown"] for line in lines] == [{"boxed": 1.0, "mine.score": None}] * 2


def test_megabytes_of_tests_are_not_written_with_each_sample(tmp_path, group):
    long = replace(group, prompt=replace(group.prompt, ground_truth="x" * 5000))
    RolloutRecorder(tmp_path).write(1, [long], is_trained=first_only)
    assert lines_of(tmp_path / "steps-000001-000100.jsonl")[0]["gt_answer"] == "x" * 2000 + "..."
