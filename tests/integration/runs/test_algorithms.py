"""Algorithms through the main job, with real vLLM and a real ColossalAI plugin."""

import json
from collections import Counter

import pytest

NEVER_RIGHT = "123456789"  # the model guesses 1, 2 or 3


def read_rollouts(run):
    return [json.loads(line) for path in sorted((run.run_dir / "rollouts").iterdir()) for line in path.open()]


def test_dapo_fills_every_step_with_effective_prompts_where_half_can_teach_nothing(
    make_tiny, start_run, flags, tmp_path
):
    model, data = make_tiny(tied=True), tmp_path / "half.jsonl"
    rows = [json.loads(line) for line in (model / "train.jsonl").read_text().splitlines()[:40]]
    for row in rows[::2]:
        row["gt_answer"] = NEVER_RIGHT
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # P * ibs = 8, tbs * dp = 4: K = 2
    sizes = ["-d", data, "-ibs", 8, "-imbs", 8, "-tbs", 4, "-tMbs", 2, "-g", 8, "-e", 2]
    run = start_run(*flags(model), *sizes, "--algo", "DAPO")
    assert run.wait() == 0, run.text()
    records = run.records()
    assert len(records) >= 5
    assert all(record["samples_in_loss"] > 4 * 8 // 2 for record in records), "only truncated ones are left out"
    num_trained, rollouts = len(records) * 4, read_rollouts(run)
    total, filtered = (sum(record[key] for record in records) for key in ("groups_total", "groups_filtered"))
    assert filtered >= 20, "half of 80 prompts teach nothing; those after the last step are not counted"
    assert total - filtered == num_trained
    samples = Counter(record["uid"] for record in rollouts)
    assert set(samples.values()) == {8}, "no prompt was rolled out twice in an episode"
    trained = {record["uid"] for record in rollouts if record["is_trained"]}
    assert len(trained) == num_trained
    impossible = {record["uid"] for record in rollouts if record["gt_answer"] == NEVER_RIGHT}
    assert impossible and not trained & impossible


def test_a_corrected_sequence_loss_clips_the_second_step_of_each_sync_against_the_policy_that_sampled(
    make_tiny, start_run, flags
):
    options = ["--algo", "GSPO", "--off-policy-correction", "tis", "--entropy-coeff", 0.01]
    sizes = ["-ibs", 8, "-imbs", 8, "-tbs", 4, "-tMbs", 4, "--max-steps", 4]
    run = start_run(*flags(make_tiny(tied=True)), *options, *sizes)
    assert run.wait() == 0, run.text()
    records = run.records()
    assert [record["ratio_max"] == pytest.approx(1, abs=1e-6) for record in records] == [True, False, True, False]
    assert all(record["correction_mean"] == pytest.approx(1, abs=1e-5) for record in records)
    assert all(record["old_logprob_gap_mean"] < 1e-4 for record in records), "both are of the weights of the last sync"
    assert [record["logprob_gap_mean"] is None for record in records] == [False, True, False, True]
