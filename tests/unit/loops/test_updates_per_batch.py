"""Test runs with several optimizer steps on each batch against a plain loop, repeated, resumed and clipped."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from coati_rl.errors import ConfigError
from coati_rl.work import RepeatWork
from tests.unit.loops.recorded_run import replay_of, write_metrics
from tests.unit.loops.test_recompute import files_of

# K = 2 batches of two prompts a rollout step, so 4 prompts; 8 prompts are 2 rollout steps of 4 optimizer steps.
TWICE = {"updates_per_batch": 2}
NUM_BATCHES = 2
# A plain loop adds in another order. AdamW's eps keeps it from dividing a rounding error by its own size.
PLAIN = {"num_generations": 4, "kl_coeff": 0.05, "skip_threshold": None, "max_grad_norm": 0.1, "adam_eps": 1e-5}


@pytest.fixture(scope="module")
def whole(run_in_threads, parity_file):
    """A run with a checkpoint after each weight sync."""
    reward = {"reward_type": f"{parity_file}:score"}
    return run_in_threads({**TWICE, **reward, "save_interval": 1, "old_logprobs": "trainer"})


def batches_of(trace):
    """Lines of the rollouts, batch by batch."""
    config, lines = files_of(trace)
    steps = sorted({line["step"] for line in lines})
    return config, [[line for line in lines if line["step"] == step] for step in steps]


def token_logprobs(model, line):
    """float32[T] of the response."""
    prompt, response = line["prompt_token_ids"], line["token_ids"]
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / line["temperature"], dim=-1)[torch.arange(len(response)), response]


def plain_loss(model, lines, old_logprobs, ref_logprobs, config):
    """GRPO's loss over the samples of a batch: clipped ratio and k3, mean over tokens, then over samples."""
    losses = []
    for line, old, reference in zip(lines, old_logprobs, ref_logprobs, strict=True):
        logprobs, advantage = token_logprobs(model, line), line["advantage"]
        ratio = (logprobs - old).exp()
        clipped = ratio.clamp(1 - config["clip_eps_low"], 1 + config["clip_eps_high"])
        log_ratio = reference - logprobs
        kl = log_ratio.exp() - log_ratio - 1
        losses.append((-torch.minimum(ratio * advantage, clipped * advantage) + config["kl_coeff"] * kl).mean())
    return torch.stack(losses).mean()


def train_plainly(trace):
    """PPO epochs as a loop: (weights at the end, loss of each optimizer step)."""
    config, batches = batches_of(trace)
    load = lambda: AutoModelForCausalLM.from_pretrained(config["model"], dtype=torch.float32)  # noqa: E731
    model, reference, losses, rates = load(), load(), [], [step["learning_rate"] for step in trace.steps]
    vectors = {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}  # norms and biases
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.dim() > 1]}, vectors],
        betas=config["adam_betas"],
        eps=config["adam_eps"],
        weight_decay=config["weight_decay"],
    )
    for start in range(0, len(batches), NUM_BATCHES):
        rollout_step = [[line for line in batch if line["is_trained"]] for batch in batches[start:][:NUM_BATCHES]]
        with torch.no_grad():
            of_engine = [[torch.tensor(line["rollout_logprobs"]) for line in batch] for batch in rollout_step]
            of_policy = [[token_logprobs(model, line) for line in batch] for batch in rollout_step]
            of_reference = [[token_logprobs(reference, line) for line in batch] for batch in rollout_step]
        old = of_policy if config["old_logprobs"] == "trainer" else of_engine
        for _ in range(config["updates_per_batch"]):
            for batch, *logprobs in zip(rollout_step, old, of_reference, strict=True):
                optimizer.zero_grad()
                loss = plain_loss(model, batch, *logprobs, config)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), config["max_grad_norm"])
                for group in optimizer.param_groups:
                    group["lr"] = rates[len(losses)]
                optimizer.step()
                losses.append(loss.item())
    return dict(model.named_parameters()), losses


@pytest.mark.sampled(2)
@pytest.mark.parametrize("old_logprobs", ["trainer", "engine"])
def test_weights_and_losses_are_those_of_a_plain_loop(run_in_threads, old_logprobs):
    trace = run_in_threads({**TWICE, **PLAIN, "old_logprobs": old_logprobs})
    weights, losses = train_plainly(trace)
    assert len(trace.steps) == len(losses) == 8
    assert [step["loss"] for step in trace.steps] == pytest.approx(losses, rel=1e-4, abs=1e-6)
    for name, weight in trace.weights.items():
        torch.testing.assert_close(weight, weights[name].detach(), rtol=0, atol=1e-6)


def test_the_first_update_is_on_policy_and_later_ones_are_clipped(run_in_threads):
    # One batch a rollout step, so that each has its own old policy: the one before its first update.
    settings = {"old_logprobs": "trainer", "inference_batch_size": 2, "num_generations": 8, "learning_rate": 1e-2}
    steps = run_in_threads({**settings, "updates_per_batch": 3, "max_steps": 6}).steps
    assert [step["update"] for step in steps] == [0, 1, 2] * 2
    for step in steps:
        assert (step["ratio_max"] == 1.0) == (step["update"] == 0)
        assert (step["clip_fraction"] > 0) == (step["update"] > 0)
    # The scripted engine's are not the trainer's, by the same for each update of a batch.
    of_batches = [[step["old_logprob_gap_mean"] for step in steps[first:][:3]] for first in range(0, 6, 3)]
    assert all(len(set(gaps)) == 1 and gaps[0] > 0 for gaps in of_batches)
    assert [step["logprob_gap_mean"] is None for step in steps] == [False, True, True] * 2, "measured once"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("parts", [{"algo": "REINFORCE_PP"}, {"algo": "GSPO", "off_policy_correction": "tis"}])
def test_what_a_batchs_targets_come_from_is_the_same_in_each_update(run_in_threads, parts):
    steps = run_in_threads({**TWICE, **parts, "inference_batch_size": 2, "max_steps": 4}).steps
    for first, later in zip(steps[::2], steps[1::2], strict=True):
        names = ("correction_mean", "kl_mean", "samples_in_loss", "staleness_mean")
        assert [later[name] for name in names] == pytest.approx([first[name] for name in names])
        assert later["loss"] != first["loss"]


@pytest.mark.full
def test_weights_are_sent_after_the_last_update_of_a_rollout_steps_batches(whole):
    assert [event["policy_version"] for event in whole.of("sync")] == [0, 4, 8]
    assert [event["step"] for event in whole.of("checkpoint")] == [4, 8]
    assert sum(isinstance(work, RepeatWork) for work in whole.work) == 4
    assert sorted({group.oldest_version for group in whole.groups}) == [0, 4]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("step", [2, 4, 7])
def test_a_later_update_is_replayed_with_the_batch_of_its_first_one(whole, step):
    stages = {stage.name: stage.verdict for stage in replay_of(write_metrics(whole)).stages(step)}
    compared = ("advantage", "scores", "loss", "gradient")
    assert [stages[name] for name in compared] == ["agrees"] * len(compared)


@pytest.mark.full
def test_a_run_is_repeatable(whole, run_in_threads):
    again = run_in_threads({**TWICE, "save_interval": 1, "old_logprobs": "trainer"})
    assert again.responses == whole.responses
    for name, weight in whole.weights.items():
        torch.testing.assert_close(again.weights[name], weight, rtol=0, atol=0)


def test_resumed_the_run_is_bit_for_bit_the_uninterrupted_one(whole, run_in_threads, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(whole.paths.run_dir, run_dir)
    fields = {"run_dir": str(run_dir), "checkpoint_path": str(run_dir / "checkpoints" / "step-4")}
    trace = run_in_threads({**TWICE, "save_interval": 1, "old_logprobs": "trainer", **fields})
    assert trace.prepared.plan.num_steps == 8
    for key in ("update", "loss", "grad_norm", "learning_rate", "reward_mean", "ratio_max"):
        assert [record[key] for record in trace.steps] == [record[key] for record in whole.steps[4:]]
    for name, weight in whole.weights.items():
        torch.testing.assert_close(trace.weights[name], weight, rtol=0, atol=0)
    lines = [json.loads(line) for file in sorted(trace.paths.rollouts.iterdir()) for line in file.open()]
    trained = [(line["step"], line["uid"]) for line in lines if line["sample"] == 0]
    assert [step for step, _ in trained] == [1, 1, 2, 2, 5, 5, 6, 6]
    assert len({uid for _, uid in trained}) == 8


def test_a_checkpoint_between_the_updates_that_a_batch_would_have_now_is_refused(whole, run_in_threads):
    fields = {"updates_per_batch": 3, "checkpoint_path": str(whole.paths.checkpoints / "step-4")}
    with pytest.raises(ConfigError, match=r"^--updates-per-batch 3: .* has taken 4 optimizer steps, which is"):
        run_in_threads(fields)
