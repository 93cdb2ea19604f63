"""Test whole runs whose weights of KL and entropy, and whose reference, follow the policy."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import coati
from tests.unit.loops.test_library import GRPO, completions_of

ADAPTIVE = {"kl_controller": "adaptive", "kl_target": 1e-5, "kl_horizon": 100.0, "kl_coeff": 0.1}
ENTROPY = {"entropy_target": 50.0, "entropy_coeff_delta": 0.002}
FOLLOWING = {**ADAPTIVE, **ENTROPY, "reference_update": "ema=0.5", "save_interval": 1, "inference_batch_size": 2}


@pytest.fixture(scope="module")
def whole(run_in_threads):
    return run_in_threads(FOLLOWING)


def column(trace, name):
    return [step[name] for step in trace.steps]


def test_the_weights_of_a_step_follow_from_the_steps_before_it(whole) -> None:
    coeff, expected = 0.1, []
    for step in whole.steps:
        expected.append(coeff)
        error = min(max(step["kl_mean"] / 1e-5 - 1, -0.2), 0.2)
        coeff *= 1 + error * step["samples_computed"] / 100
    assert column(whole, "kl_coeff") == pytest.approx(expected)
    assert column(whole, "entropy_coeff") == pytest.approx([0.0, 0.002, 0.004, 0.006])


def test_a_resumed_run_goes_on_with_the_weight_that_it_had(run_in_threads, whole, tmp_path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(whole.paths.run_dir, run_dir)
    fields = {"run_dir": str(run_dir), "checkpoint_path": str(run_dir / "checkpoints" / "step-2")}
    trace = run_in_threads(FOLLOWING | fields)
    for name in ("kl_coeff", "entropy_coeff", "kl_mean", "loss", "grad_norm"):
        assert column(trace, name) == column(whole, name)[2:]
    for name in ("", "reference"):
        file = next((trace.paths.checkpoints / "step-4" / name).glob("model*.safetensors"))
        assert file.read_bytes() == (whole.paths.checkpoints / "step-4" / name / file.name).read_bytes()


def test_the_reference_is_an_average_of_the_policies_so_far(whole, make_model_dir) -> None:
    checkpoints = [whole.paths.checkpoints / f"step-{step}" for step in range(1, 5)]
    average = load_file(checkpoints[0] / "reference" / "model.safetensors")
    for checkpoint in checkpoints[1:]:
        policy, reference = (load_file(checkpoint / name / "model.safetensors") for name in ("", "reference"))
        for name, weight in reference.items():
            assert torch.allclose(weight, 0.5 * average[name] + 0.5 * policy[name], atol=1e-7)
        average = reference


@pytest.mark.full
def test_a_reset_makes_kl_begin_at_0_again(run_in_threads) -> None:
    trace = run_in_threads({"reference_update": "every=2", "kl_coeff": 0.1, "inference_batch_size": 2})
    kl = column(trace, "kl_mean")
    assert kl[0] == pytest.approx(0, abs=1e-12) and kl[2] == pytest.approx(0, abs=1e-12) and kl[1] > 0 and kl[3] > 0


@pytest.mark.full
def test_a_critic_s_rewards_have_the_weight_of_the_step(run_in_threads) -> None:
    trace = run_in_threads({**ADAPTIVE, "algo": "PPO", "inference_batch_size": 2})
    assert len(set(column(trace, "kl_coeff"))) == 4 and column(trace, "kl_coeff")[0] == 0.1


@pytest.mark.full
def test_a_loop_of_one_s_own_goes_on_with_them_too(run_in_threads, model_dir, tmp_path) -> None:
    (first, *_) = run_in_threads({"algo": "GRPO", "max_steps": 1}).groups
    found = coati.group_samples(completions_of(first), [1.0, 0.0])
    settings = {**GRPO, **ADAPTIVE}

    def step(trainer):
        metrics = trainer.forward_backward(found)
        trainer.optim_step(lr=1e-3)
        return metrics["kl_coeff"]

    with coati.Trainer(model_dir, "grpo", **settings) as trainer:
        assert step(trainer) == 0.1
        trainer.save(tmp_path / "step-1")
        second = step(trainer)
    with coati.Trainer(model_dir, "grpo", **settings) as resumed:
        resumed.load(tmp_path / "step-1")
        assert step(resumed) == second != 0.1


def test_a_group_of_one_s_own_is_weighed_by_its_lengths(whole) -> None:
    (first, *_) = whole.groups
    completions = completions_of(first)
    lengths = [len(completion.token_ids) for completion in completions]
    rewards = [1.0, *[0.0] * (len(completions) - 1)]
    found = [float(np.mean(sample.arrays["advantages"])) for sample in coati.group_samples(completions, rewards, "opo")]
    baseline = lengths[0] / sum(lengths)
    assert found == pytest.approx([reward - baseline for reward in rewards])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("selection", "changes"),
    [
        ("top_entropy", {"updates_per_batch": 2, "max_steps": 4}),
        ("top_entropy", {"algo": "PPO"}),
        ("clip_cov", {"old_logprobs": "trainer"}),
        ("kl_cov", {}),
    ],
)
def test_selected_tokens_go_with_the_other_parts_of_a_run(run_in_threads, selection, changes) -> None:
    flags = {"token_selection": selection, "token_fraction": 0.5}
    flags |= {"token_covariance": (-9.0, 9.0)} if selection == "clip_cov" else {}
    trace = run_in_threads({**flags, **changes})
    assert all(step["grad_norm"] > 0 for step in trace.steps)
