"""Runs with trainers that are cut up: they sync and save the whole model, and -cp goes on from it."""

from pathlib import Path

import pytest
import torch
import xxhash

from tests.integration.runs.records import (
    GAP_LIMIT,
    assert_complete,
    assert_engine_and_trainer_agree,
    lines,
    trained_samples,
)

FOUR_TRAINERS = ("-t", 4, "-tp", 2, "-pp", 2, "-tbs", 4, "-tMbs", 4)
GSM8K = Path(__file__).parents[2] / "data" / "gsm8k_16.jsonl"


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


def test_tensor_and_pipeline_parallel_trainers_save_what_they_sync_and_any_layout_resumes(make_tiny, start_run, flags):
    model = make_tiny(tied=True)
    first = start_run(*flags(model), *FOUR_TRAINERS, "--max-steps", 3, "-si", 2, "-kl", 0.01, name="first")
    records = assert_complete(first, steps=3)
    assert_engine_and_trainer_agree(records)
    assert all(record["kl_mean"] is not None for record in records), "there is a reference model"
    checkpoint = first.run_dir / "checkpoints" / "step-2"
    digests = {line["step"]: line["digest"] for line in lines(first.run_dir / "syncs.jsonl")}
    assert digests[2] == digest_of(checkpoint)
    assert digests[3] == digest_of(first.run_dir / "checkpoints" / "step-3") != digests[2]

    second = start_run(*flags(model), "-cp", checkpoint, "--max-steps", 3, "-kl", 0.01, name="second")
    assert second.wait() == 0, second.text()
    (expected,), (found,) = records[2:], second.records()
    assert found["step"] == 3 and found["logprob_gap_mean"] < GAP_LIMIT
    # The same prompts under the same weights and seeds, trained by one process: the same step.
    assert trained_samples(second, {3}) == trained_samples(first, {3})
    assert found["reward_mean"] == expected["reward_mean"]
    assert abs(found["grad_norm"] - expected["grad_norm"]) < 1e-3 * expected["grad_norm"]


@pytest.mark.parametrize("backend", ["transformers", pytest.param("vllm", marks=pytest.mark.full)])
def test_zero_trainers_one_step_ahead_resume_in_their_own_run_directory(make_tiny, start_run, flags, backend):
    data = ("-d", GSM8K, "-mpt", 1024, "-rt", "think_answer_tags", "-e", 2)
    zero = (*flags(make_tiny(tied=False), trainers=2), *data, "-b", backend, "-zero", 1, "-nb", 1)
    first = start_run(*zero, "--max-steps", 3, "-si", 1, "--keep-checkpoints", 2)
    records = assert_complete(first, steps=3)
    assert max(record["staleness_max"] for record in records) == 1
    assert records[0]["logprob_gap_mean"] < 5e-3, "bfloat16"
    assert all(record["logprob_gap_mean"] is None for record in records if record["staleness_mean"] == 1)
    checkpoints = first.run_dir / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-2", "step-3"]

    second = start_run(*zero, "-cp", first.run_dir, "--max-steps", 5, "--keep-checkpoints", 2)
    assert second.wait() == 0, second.text()
    assert [record["step"] for record in second.records()] == [1, 2, 3, 4, 5]
    samples = trained_samples(first, range(1, 6))
    assert len(samples) == len(set(samples)) == 5 * 4 * 4, "steps x prompts x samples"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-3", "step-5"]
