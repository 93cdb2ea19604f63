"""Test runs with sharded trainers: they sync and save the whole model, and -cp resumes from it."""

import pytest
import torch
import xxhash

from coati_rl.command_line import main
from tests.integration.runs.records import (
    GAP_LIMIT,
    assert_complete,
    assert_engine_and_trainer_agree,
    assert_weights_moved,
    lines,
    read_rollouts,
    trained_samples,
)
from tests.integration.runs.resuming import assert_goes_on_bit_for_bit

LAYOUTS = {
    "pp2": ("-t", 2, "-pp", 2, "-tbs", 4, "-tMbs", 4),
    "tp2_pp2": ("-t", 4, "-tp", 2, "-pp", 2, "-tbs", 4, "-tMbs", 4),
    "fsdp2": ("-t", 2, "--plugin", "fsdp2", "-tbs", 2, "-tMbs", 2),
    "fsdp2_tp2": ("-t", 4, "--plugin", "fsdp2", "-tp", 2, "-tbs", 2, "-tMbs", 2),
    "fsdp2_copies": ("-t", 4, "--plugin", "fsdp2", "--fsdp-size", 2, "-tbs", 1, "-tMbs", 1),
}


def digest_of(checkpoint):
    """xxh3-128 over all weights in Hugging Face order as float32, as transformers loads them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    hasher, seen = xxhash.xxh3_128(), set()
    for weight in model.state_dict(keep_vars=True).values():
        if id(weight) not in seen:  # a tied LM head is the embedding
            seen.add(id(weight))
            hasher.update(weight.detach().float().contiguous().view(torch.uint8).numpy())
    return hasher.hexdigest()


def run_cut_up(make_tiny, start_run, flags, layout, steps):
    """A run with trainers in this layout, a reference model and a checkpoint at step 2; and its records."""
    run = start_run(
        *flags(make_tiny(tied=True)), *LAYOUTS[layout], "--max-steps", steps, "-si", 2, "-kl", 0.01, name="first"
    )
    records = assert_complete(run, steps=steps)
    assert_engine_and_trainer_agree(records)
    assert all(record["kl_mean"] is not None for record in records)
    return run, records


def assert_saved_as_synced(run, *steps):
    """The checkpoints after these steps hold the weights that were sent, and each others."""
    sent = {line["step"]: line["digest"] for line in lines(run.run_dir / "syncs.jsonl")}
    saved = [digest_of(run.run_dir / "checkpoints" / f"step-{step}") for step in steps]
    assert saved == [sent[step] for step in steps]
    assert len(set(saved)) == len(steps)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_trainers_that_are_cut_up_save_what_they_sync(make_tiny, start_run, flags, layout):
    run, _ = run_cut_up(make_tiny, start_run, flags, layout, steps=3)
    assert_saved_as_synced(run, 2, 3)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_process_resumes_what_trainers_that_are_cut_up_have_saved(make_tiny, start_run, flags, layout):
    first, records = run_cut_up(make_tiny, start_run, flags, layout, steps=3)
    options = ("-cp", first.run_dir / "checkpoints" / "step-2", "--max-steps", 3, "-kl", 0.01)
    second = start_run(*flags(make_tiny(tied=True)), *options, name="second")
    assert second.wait() == 0, second.text()
    (expected,), (found,) = records[2:], second.records()
    assert found["step"] == 3 and found["logprob_gap_mean"] < GAP_LIMIT
    # The same prompts under the same weights and seeds, trained by one process: the same step.
    assert trained_samples(second, {3}) == trained_samples(first, {3})
    assert found["reward_mean"] == expected["reward_mean"]
    assert abs(found["grad_norm"] - expected["grad_norm"]) < 1e-3 * expected["grad_norm"]


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("num_experts", "flag"), [(0, ("--fsdp-size", 1)), (4, ("--expert-parallel", 2))])
def test_a_killed_run_with_copies_or_shared_out_experts_goes_on_bit_for_bit(
    make_tiny, start_run, flags, num_experts, flag
):
    """An engine rounds by the requests that it decodes together: each of these is a batch of its own."""
    model = make_tiny(tied=True, num_experts=num_experts)
    layout = ("-t", 2, "--plugin", "fsdp2", *flag, "-tbs", 2, "-tMbs", 2, "-b", "transformers")
    job = (*flags(model), *layout, "--max-num-seqs", 4, "-si", 1, "--max-steps", 4)
    assert_goes_on_bit_for_bit(start_run, job, places=(4,), keys=("loss", "grad_norm", "logprob_gap_mean"))


LORA = ("--lora-rank", 4, "-lr", 1e-2)
ONE_STEP_AHEAD = ("-nb", 1, "-si", 1, "--keep-checkpoints", 2)


def assert_one_step_ahead(run, records):
    """Tokens of earlier weights are trained, and measured with the weights that sampled them."""
    assert max(record["staleness_max"] for record in records) == 1
    assert any(record["staleness_mean"] == 1 for record in records), "no token of the trainer's own version"
    assert_weights_moved(records)
    # What rounding is on this processor: the probe under the weights that both sides have loaded.
    rounding = lines(run.run_dir / "syncs.jsonl")[0]["probe_gap_mean"]
    num_tokens = sum(record["logprob_gap_tokens"] for record in records)
    gap = sum(record["logprob_gap_mean"] * record["logprob_gap_tokens"] for record in records) / num_tokens
    assert gap < max(GAP_LIMIT, 2 * rounding)


@pytest.mark.full
@pytest.mark.parametrize("trained", [LORA, ()], ids=["adapters", "weights"])
def test_a_pipeline_one_step_ahead_is_rewarded_for_programs_that_pass_their_tests(
    make_tiny, start_run, flags, tmp_path, trained
):
    code = ("-rt", "code", "--test-timeout-s", 5, "-b", "transformers", "-kl", 0.01)
    job = (*flags(make_tiny(tied=True, writes_programs=True)), *LAYOUTS["pp2"], *ONE_STEP_AHEAD, *trained)
    run = start_run(*job, *code, "--max-steps", 4)
    run.wait_for_step(1)
    assert any("bwrap" in process.name() for process in run.processes()), "programs run in the sandbox"
    records = assert_complete(run, steps=4)
    assert_one_step_ahead(run, records)
    assert all(record["samples_invalid"] == 0 for record in records)
    assert all(record["kl_mean"] is not None for record in records)
    assert all(0 <= record["reward_mean"] <= record["reward/tests_passed"] <= 1 for record in records)
    assert 0 < records[0]["reward_mean"] < 1, "the model guesses"
    samples = trained_samples(run, range(1, 5))
    assert len(samples) == len(set(samples)) == 4 * 4 * 4, "steps x prompts x samples"
    rollouts = read_rollouts(run)
    assert {"ok", "wrong"} <= {sample["verdict"] for sample in rollouts}
    right = next(sample for sample in rollouts if sample["verdict"] == "ok")
    assert right["detail"] == "2 of 2 tests passed" and right["breakdown"] == {"tests_passed": 1.0}
    assert "print(2)" in right["response"]
    assert sorted(path.name for path in (run.run_dir / "checkpoints").iterdir()) == ["step-3", "step-4"]
    if trained:  # a checkpoint and its base are what was served
        checkpoint = run.run_dir / "checkpoints" / "step-4"
        assert main(["merge", str(checkpoint), str(tmp_path / "merged")]) == 0
        synced = {line["step"]: line["digest"] for line in lines(run.run_dir / "syncs.jsonl")}
        assert digest_of(tmp_path / "merged") == synced[4]
        assert {sample["weights"][-1] for sample in rollouts} <= {*synced.values()}
    else:
        assert_saved_as_synced(run, 3, 4)
    assert run.left_over() == []


@pytest.mark.full
def test_zero_trainers_one_step_ahead_resume_in_their_own_run_directory(make_tiny, start_run, flags):
    job = (*flags(make_tiny(tied=False), trainers=2), *ONE_STEP_AHEAD, "-zero", 1)
    first = start_run(*job, "--max-steps", 3)
    assert_one_step_ahead(first, assert_complete(first, steps=3))
    checkpoints = first.run_dir / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-2", "step-3"]

    second = start_run(*job, "-cp", first.run_dir, "--max-steps", 5)
    assert second.wait() == 0, second.text()
    assert [record["step"] for record in second.records()] == [1, 2, 3, 4, 5]
    samples = trained_samples(first, range(1, 6))
    assert len(samples) == len(set(samples)) == 5 * 4 * 4, "steps x prompts x samples"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-4", "step-5"]
