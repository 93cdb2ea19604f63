"""Test variants of the main job in whole runs, which smaller tests cover in the fast suite."""

from pathlib import Path

import pytest

from tests.integration.runs.records import GAP_LIMIT, assert_complete, assert_engine_and_trainer_agree, lines

pytestmark = pytest.mark.full


def test_two_trainers_and_two_producers_train_every_sample_once(make_tiny, start_run, flags):
    run = start_run(*flags(make_tiny(tied=True), trainers=2, inferencers=2), "--max-steps", 3)
    assert_engine_and_trainer_agree(assert_complete(run, steps=3))
    rollouts = [line for path in (run.run_dir / "rollouts").iterdir() for line in lines(path)]
    assert len(rollouts) == len({(line["uid"], line["sample"]) for line in rollouts}) == 3 * 8 * 4


def test_gsm8k_runs_ahead_of_vllm_within_the_bound_on_staleness(make_tiny, start_run, flags):
    rows = Path(__file__).parents[2] / "data" / "gsm8k_16.jsonl"
    options = ["-d", rows, "-mpt", 1024, "-rt", "think_answer_tags", "-tbs", 2, "-tMbs", 1, "-nb", 1]
    records = assert_complete(start_run(*flags(make_tiny(tied=True)), *options), steps=8)
    assert max(record["staleness_max"] for record in records) == 1
    assert sum(record["staleness_mean"] == 1 for record in records) >= 4, (
        "steps that hold no token of the trainer's own"
    )
    assert all(record["logprob_gap_mean"] < GAP_LIMIT and record["logprob_gap_tokens"] > 0 for record in records)


@pytest.mark.parametrize("cut", [["-b", "transformers", "-topk", 2], ["-b", "vllm", "--min-p", 0.3]])
def test_a_backend_that_cuts_the_distribution_uses_the_trainers_own_old_logprobs(make_tiny, start_run, flags, cut):
    options = [*cut, "-temp", 0.7, "--max-steps", 2]
    records = assert_complete(start_run(*flags(make_tiny(tied=True)), *options), steps=2)
    assert all(record["ratio_max"] == pytest.approx(1, abs=1e-4) for record in records), "recomputed just before"
    assert all(record["logprob_gap_mean"] > 1e-2 for record in records), "engine values are renormalised: a real gap"


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
    assert all(record["logprob_gap_mean"] < GAP_LIMIT for record in records), "in every second step by kept weights"
