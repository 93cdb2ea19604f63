"""Test that a run one step ahead resumes from a checkpoint with the same samples, records and weights, bit for bit."""

import json

import pytest

from tests.integration.runs.records import assert_complete, lines, read_rollouts

MEASURED = ("loss", "grad_norm", "learning_rate", "reward_mean", "staleness_mean", "num_response_tokens")


def files_of(run, step):
    """Name -> digest of the files of a checkpoint whose content does not depend on time."""
    manifest = json.loads((run.run_dir / "checkpoints" / f"step-{step}" / "manifest.json").read_text())
    return {n: entry["xxh3_128"] for n, entry in manifest["files"].items() if n not in ("state.json", "rollouts.npz")}


@pytest.mark.full
def test_a_run_one_step_ahead_resumes_bit_for_bit(make_tiny, start_run, flags):
    job = (*flags(make_tiny(tied=True), prompts=8), "-nb", 1, "-si", 1, "-temp", 1.5, "--max-steps", 6)
    whole = start_run(*job)
    records = assert_complete(whole, steps=6)
    assert [record["staleness_mean"] for record in records[1:]] == [1.0] * 5
    kept = json.loads((whole.run_dir / "checkpoints" / "step-3" / "state.json").read_text())["data"]["position"]["kept"]
    assert len(kept) == 8, "a whole rollout step, of weights that the checkpoint does not hold"

    resumed = start_run(*job, "-cp", whole.run_dir / "checkpoints" / "step-3", name="resumed")
    assert resumed.wait() == 0, resumed.text()
    expected = [sample for sample in read_rollouts(whole) if sample["step"] > 3]
    assert len(expected) == 3 * 8 * 4
    assert read_rollouts(resumed) == expected
    found = lines(resumed.run_dir / "metrics.jsonl")
    assert [[r[key] for key in MEASURED] for r in found] == [[r[key] for key in MEASURED] for r in records[3:]]
    assert files_of(resumed, 6) == files_of(whole, 6)
