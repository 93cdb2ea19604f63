"""Test what is read of a rehearsal's small run: its parts, and samples without a score."""

import json

import pytest

from coati_rl.config import Config
from coati_rl.errors import RunError
from coati_rl.rehearsal.run_findings import failures, finding
from coati_rl.run_reader.run_directory import RunDirectory

LINE = {
    "step": 1,
    "uid": "train-1.0",
    "sample": 0,
    "episode": 0,
    "prompt": "1+1?",
    "gt_answer": "2",
    "response": "3",
    "num_tokens": 1,
    "finish_reason": "stop",
    "policy_versions": [0, 0],
    "reward": 0.0,
    "verdict": "wrong",
    "detail": "",
    "is_trained": True,
    "advantage": 0.0,
}
INVALID = {**LINE, "verdict": "invalid", "reward": None, "detail": "timed out after 5 s"}


@pytest.fixture
def run(tmp_path):
    """(lines of rollouts) -> the directory of a run of two steps."""

    def make(*lines):
        (tmp_path / "rollouts").mkdir()
        (tmp_path / "config.yaml").write_text("model: m\n")
        for name, rows in {
            "metrics.jsonl": [{"step": 1, "logprob_gap_mean": 2e-7}, {"step": 2, "logprob_gap_mean": None}],
            "syncs.jsonl": [{"step": 0}, {"step": 1}, {"step": 2}],
            "rollouts/steps-000001-000100.jsonl": lines,
        }.items():
            (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return RunDirectory(tmp_path)

    return make


def test_what_was_done_is_one_line(run):
    assert finding(run()) == "2 steps, 3 weight syncs, 0 checkpoints, engine and trainer 2e-07 nats apart"


def test_samples_without_a_score_are_a_warning_with_their_causes_and_the_runs_own_limit(run):
    config = Config(model="m", dataset="d")
    assert [*failures(run(LINE, LINE, LINE, INVALID), config)] == [
        "1 of 4 samples have no score, and --max-failure-rate 0.1 stops a run: 1 x timed out after 5 s"
    ]


def test_a_share_of_exactly_the_limit_does_not_stop_a_run(run):
    config = Config(model="m", dataset="d", max_failure_rate=0.29)
    (warning,) = failures(run(*[LINE] * 71, *[INVALID] * 29), config)
    assert warning == "29 of 100 samples have no score: 29 x timed out after 5 s"


def test_a_run_none_of_whose_samples_has_a_score_would_fail(run):
    with pytest.raises(RunError, match="none of 2 samples has a score: 2 x timed out after 5 s"):
        [*failures(run(INVALID, INVALID), Config(model="m", dataset="d"))]
