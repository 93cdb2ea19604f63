"""Recompute a step's metrics from a run's files: config.yaml, rollouts and checkpoints."""

import json
from collections import defaultdict

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

# The fake engine's log-probabilities are not the model's: ratios are far from 1, so that clipping and k3 take part.
RUNS = {
    "GRPO": {"num_generations": 4, "kl_coeff": 0.05},
    "DAPO": {"num_generations": 8, "num_episodes": 2, "max_steps": 3, "temperature": 0.7},
}


@pytest.fixture(scope="module", params=RUNS)
def trace(request, run_in_threads):
    settings = {
        "save_interval": 1,
        "inference_batch_size": 2,
        "n_behind": 1,
        "skip_threshold": None,
        **RUNS[request.param],
    }
    return run_in_threads({"algo": request.param, **settings})


def files_of(trace):
    """(settings, lines of the rollouts)"""
    (rollouts,) = trace.paths.rollouts.iterdir()
    lines = [json.loads(line) for line in rollouts.read_text(encoding="utf-8").split("\n")[:-1]]
    return yaml.safe_load((trace.paths.run_dir / "config.yaml").read_text()), lines


def advantages_of(group, config):
    """DeepSeekMath sec. 4.1.2 over the decided samples, with DAPO's eq. 13 where the run punishes length."""
    limit = config["max_new_tokens"]
    cache = config["cache_length"] or max(1, min(1024, limit // 4))
    rewards = []
    for line in group:
        excess = min(max(line["num_tokens"] - (limit - cache), 0), cache)
        rewards.append(line["reward"] - config["soft_over_length_punishment"] * excess / cache)
    rewards = np.array(rewards)
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6) if np.ptp(rewards) else 0.0 * rewards


def token_logprobs(model, line):
    """float32[T] of the response."""
    prompt, response = line["prompt_token_ids"], line["token_ids"]
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / line["temperature"], dim=-1)[torch.arange(len(response)), response]


def recomputed(lines, config, model, reference):
    """The loss, to be differentiated, of a step's lines."""
    trained = [line for line in lines if line["is_trained"]]
    num_tokens = sum(line["num_tokens"] for line in trained)
    loss = torch.zeros(())
    for line in trained:
        logprobs, advantage = token_logprobs(model, line), line["advantage"]
        ratio = (logprobs - torch.tensor(line["rollout_logprobs"])).exp()
        clipped = ratio.clamp(1 - config["clip_eps_low"], 1 + config["clip_eps_high"])
        terms = -torch.minimum(ratio * advantage, clipped * advantage)
        if config["kl_coeff"]:
            with torch.no_grad():
                ref_logprobs = token_logprobs(reference, line)
            log_ratio = ref_logprobs - logprobs
            terms = terms + config["kl_coeff"] * (log_ratio.exp() - log_ratio - 1)
        by_token = config["loss_variation"] == "token_level"
        loss = loss + terms.sum() / (num_tokens if by_token else len(terms) * len(trained))
    return loss


def test_the_loss_and_gradient_of_every_step_follow_from_what_the_run_wrote(trace):
    config, written = files_of(trace)
    by_step = defaultdict(list)
    for line in written:
        by_step[line["step"]].append(line)
    reference = AutoModelForCausalLM.from_pretrained(config["model"])
    assert len(trace.steps) >= 3
    for record in trace.steps:
        step, lines = record["step"], by_step[record["step"]]
        begins_with = trace.paths.checkpoints / f"step-{step - 1}" if step > 1 else config["model"]
        model = AutoModelForCausalLM.from_pretrained(begins_with, dtype=torch.float32)
        loss = recomputed(lines, config, model, reference)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        assert sum(line["is_trained"] for line in lines) == record["samples_in_loss"] > 0
        assert loss.item() == pytest.approx(record["loss"], rel=1e-4, abs=1e-6)
        assert norm.item() == pytest.approx(record["grad_norm"], rel=1e-4)


def test_advantages_and_staleness_follow_too(trace):
    config, written = files_of(trace)
    groups = defaultdict(list)
    for line in written:
        groups[line["uid"]].append(line)
        assert sum(count for _, count in line["token_versions"]) == line["num_tokens"] == len(line["token_ids"])
        versions = [version for version, _ in line["token_versions"]]
        assert line["policy_versions"] == [min(versions), max(versions)]
    assert any(line["advantage"] for group in groups.values() for line in group)
    for group in groups.values():
        for line, advantage in zip(group, advantages_of(group, config), strict=True):
            assert line["advantage"] == (pytest.approx(advantage, rel=1e-9) if line["is_trained"] else None)
