"""Test whole runs with a critic: they go on from a checkpoint, and give the turns of episodes their rewards."""

import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

import coati
from coati_rl.batching.packing import build_mini_batch
from coati_rl.errors import ConfigError
from coati_rl.work import TrainWork
from tests.unit.loops.test_episodes import TALK
from tests.unit.loops.test_library import GRPO, completions_of

PPO = {"algo": "PPO", "save_interval": 1, "inference_batch_size": 2, "critic_lr": 0.01}
OF_THE_CRITIC = ("value_loss", "value_mean", "return_mean", "explained_variance", "value_grad_norm")


@pytest.fixture(scope="module")
def whole(run_in_threads):
    return run_in_threads(PPO)


def go_on(run_in_threads, trace, tmp_path, *, step, **changes):
    run_dir = tmp_path / "run"
    shutil.copytree(trace.paths.run_dir, run_dir)
    fields = {"run_dir": str(run_dir), "checkpoint_path": str(run_dir / "checkpoints" / f"step-{step}")}
    return run_in_threads(PPO | fields | changes)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_resumed_run_has_the_same_bits_of_both_models(run_in_threads, whole, tmp_path, step) -> None:
    trace = go_on(run_in_threads, whole, tmp_path, step=step)
    for key in ("loss", "grad_norm", "learning_rate", *OF_THE_CRITIC):
        assert [record[key] for record in trace.steps] == [record[key] for record in whole.steps[step:]]
    for name in ("", "value"):
        files = sorted((trace.paths.checkpoints / "step-4" / name).glob("*.safetensors"))
        assert len(files) == 2
        for file in files:
            there = whole.paths.checkpoints / "step-4" / name / file.name
            assert file.read_bytes() == there.read_bytes()


def test_the_critic_begins_at_0_and_is_a_classifier_of_transformers(whole) -> None:
    assert whole.steps[0]["value_mean"] == 0.0 and whole.steps[0]["explained_variance"] == pytest.approx(0.0, abs=1e-9)
    assert all(step["value_mean"] != 0 for step in whole.steps[1:])
    directory = whole.paths.checkpoints / "step-4" / "value"
    critic = AutoModelForSequenceClassification.from_pretrained(directory, output_loading_info=True)
    model, report = critic
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        assert model(input_ids=torch.arange(1, 6)[None]).logits.abs().item() > 0


def test_the_saved_critic_is_the_start_of_another_run(run_in_threads, whole) -> None:
    trace = run_in_threads(PPO | {"critic_model": str(whole.paths.checkpoints / "step-4" / "value"), "max_steps": 1})
    assert trace.steps[0]["value_mean"] != 0


@pytest.mark.full
def test_a_checkpoint_without_a_critic_goes_on_with_a_new_one(run_in_threads, tmp_path) -> None:
    before = run_in_threads({**PPO, "algo": "REINFORCE_PP", "critic_lr": None, "max_steps": 2})
    trace = go_on(run_in_threads, before, tmp_path, step=2, max_steps=None)
    assert trace.steps[0]["value_mean"] == 0.0
    assert (trace.paths.checkpoints / "step-4" / "value" / "optimizer.safetensors").is_file()


def test_damage_to_the_critic_s_files_is_found(run_in_threads, whole, tmp_path) -> None:
    shutil.copytree(whole.paths.run_dir, tmp_path / "run")
    directory = tmp_path / "run" / "checkpoints" / "step-2"
    weights = directory / "value" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ConfigError, match=r"value/model\.safetensors"):
        run_in_threads(PPO | {"run_dir": str(tmp_path / "run"), "checkpoint_path": str(directory)})


@pytest.mark.full
def test_warm_up_moves_the_critic_alone(run_in_threads, whole) -> None:
    trace = run_in_threads({**PPO, "critic_warmup": 4})
    start, end = (whole_weights(trace, step) for step in (1, 4))
    for name, weight in start["policy"].items():
        assert torch.equal(weight, end["policy"][name])
    assert any(not torch.equal(weight, end["value"][name]) for name, weight in start["value"].items())


def whole_weights(trace, step):
    from safetensors.torch import load_file

    directory = trace.paths.checkpoints / f"step-{step}"
    return {
        "policy": load_file(directory / "model.safetensors"),
        "value": load_file(directory / "value" / "model.safetensors"),
    }


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "changes",
    [
        {"updates_per_batch": 2},
        {"inflight_update": True, "n_behind": 1, "off_policy_correction": "tis", "old_logprobs": "trainer"},
        {"train_minibatch_size": 1, "train_microbatch_size": 2},
        {"kl_place": "loss", "kl_estimator": "k3"},
        {"teacher": "<model>", "old_logprobs": "trainer"},
    ],
    ids=["updates", "in flight", "mini-batches", "KL in the loss", "teacher"],
)
def test_it_goes_with_the_other_parts_of_a_run(run_in_threads, make_model_dir, changes) -> None:
    filled = {name: str(make_model_dir(1)) if value == "<model>" else value for name, value in changes.items()}
    trace = run_in_threads({"algo": "PPO", "critic_lr": 0.01, "max_steps": 4, **filled})
    assert len(trace.steps) == 4
    for step in trace.steps:
        assert step["grad_norm"] > 0 and step["value_grad_norm"] > 0
        assert step["value_loss"] is not None and step["return_mean"] is not None
    assert trace.steps[-1]["value_mean"] != 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("changes", [{}, {"updates_per_batch": 2, "old_logprobs": "trainer"}])
def test_the_critic_may_take_more_steps_than_the_policy(run_in_threads, whole, changes) -> None:
    fields = {**PPO, "max_steps": 2, **changes}
    once, thrice = run_in_threads(fields) if changes else whole, run_in_threads(fields | {"critic_updates": 3})
    before, after = (whole_weights(trace, 2) for trace in (once, thrice))
    moved = [float((after["value"][name] - weight).abs().max()) for name, weight in before["value"].items()]
    assert max(moved) > 1e-3
    steps = [step["value_loss"] for step in thrice.steps]
    assert steps[0] == once.steps[0]["value_loss"] and steps[1] != once.steps[1]["value_loss"]
    assert thrice.steps[0]["grad_norm"] == once.steps[0]["grad_norm"]


@pytest.mark.full
def test_one_sample_a_prompt_is_enough(run_in_threads) -> None:
    trace = run_in_threads({"algo": "PPO", "num_generations": 1, "train_microbatch_size": 2, "max_steps": 2})
    assert trace.gradients and any(gradient.any() for gradient in trace.gradients[0].values())


def test_rewards_of_turns_are_at_their_last_tokens(run_in_threads) -> None:
    trace = run_in_threads({**TALK, "algo": "PPO", "max_steps": 1})
    (work,) = [each for each in trace.work if isinstance(each, TrainWork)]
    given = {
        round(float(np.float32(reward.value)), 6)
        for group in trace.groups
        for trajectory in group.trajectories
        for reward in trajectory.rewards
        if reward.value
    }
    placed, totals = set(), list[float]()
    for micro_batch in build_mini_batch(work.batch).micro_batches:
        arrays = micro_batch.loss_arrays
        rewards = arrays["token_rewards"]
        placed |= {round(float(each), 6) for each in rewards[rewards != 0]}
        for number in np.unique(arrays["sample_index"][arrays["loss_mask"]]):
            totals.append(float(rewards[arrays["sample_index"] == number].sum()))
    assert placed <= given and placed
    trained = sorted(score.reward for group in trace.groups for score in group.scores)
    assert sorted(totals) == pytest.approx(trained[-len(totals) :], abs=1e-5)


@pytest.mark.full
def test_a_loop_of_one_s_own_has_a_critic_that_is_saved_with_the_policy(run_in_threads, model_dir, tmp_path):
    run = run_in_threads({"algo": "GRPO", "max_steps": 1})
    (first, *_) = run.groups
    found = coati.group_samples(completions_of(first), [1.0, 0.0], "gae")
    assert [float(each.arrays["token_rewards"].sum()) for each in found] == [1.0, 0.0]
    assert found[0].arrays["token_rewards"][-1] == 1.0 and found[0].arrays["is_cut"] == 0.0
    with coati.Trainer(model_dir, "ppo", **GRPO) as trainer:
        metrics = trainer.forward_backward(found)
        step = trainer.optim_step(lr=1e-3)
        trainer.save(tmp_path / "step-1")
        trainer.forward_backward(found)
        right = trainer.optim_step(lr=1e-3)
    assert metrics == {} or "value_loss" in metrics
    assert step["value_grad_norm"] > 0 and step["value_mean"] == 0.0 and right["value_mean"] != 0.0
    with coati.Trainer(model_dir, "ppo", **GRPO) as resumed:
        resumed.load(tmp_path / "step-1")
        resumed.forward_backward(found)
        again = resumed.optim_step(lr=1e-3)
    assert {**again, "train_s": 0.0} == {**right, "train_s": 0.0}
