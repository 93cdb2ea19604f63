"""Recompute a step's metrics from a run's files: config.yaml, rollouts and checkpoints."""

import json
from collections import defaultdict

import numpy as np
import pytest
import yaml

from tests.unit.loops.recorded_run import replay_of, write_metrics

# The fake engine's log-probabilities are not the model's: ratios are far from 1, so that clipping and k3 take part.
RUNS = {
    "GRPO": {"num_generations": 4, "kl_coeff": 0.05, "max_steps": 3},
    "DAPO": {"num_generations": 8, "num_episodes": 2, "max_steps": 3, "temperature": 0.7},
}


@pytest.fixture(scope="module", params=["GRPO", pytest.param("DAPO", marks=pytest.mark.full)])
def trace(request, run_in_threads, parity_file):
    settings = {
        "save_interval": 1,
        "inference_batch_size": 2,
        "n_behind": 1,
        "skip_threshold": None,
        "reward_type": f"{parity_file}:score",
        **RUNS[request.param],
    }
    return run_in_threads({"algo": request.param, **settings}, score=None)


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


def test_the_loss_and_gradient_of_every_step_follow_from_what_the_run_wrote(trace):
    replay = replay_of(write_metrics(trace))
    assert len(replay.records) >= 3
    for step, record in replay.records.items():
        stages = {stage.name: stage for stage in replay.stages(step)}
        assert record["samples_in_loss"] > 0 and stages["gradient"].verdict == "agrees"
        # The fake engine's log-probabilities are no model's.
        assert [name for name, each in stages.items() if each.verdict != "agrees"] == ["rollout logprobs"]


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
