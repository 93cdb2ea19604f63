"""Provide fixtures for tests of data, coordinator and checkpoint: prompts, settings, groups, a coordinator."""

from pathlib import Path

import numpy as np
import pytest

from coati_rl.batching.batcher import BatchSettings
from coati_rl.batching.group_rules import GroupRules
from coati_rl.batching.packed_group import PackedGroup
from coati_rl.config.sync import SyncConfig
from coati_rl.coordinator.coordinator import Coordinator
from coati_rl.coordinator.evaluation import EvaluationRounds
from coati_rl.coordinator.leases import SamplingPlan
from coati_rl.coordinator.run_state import RunStart
from coati_rl.coordinator.settings import CoordinatorSettings
from coati_rl.observability.rollouts import RolloutRecorder
from coati_rl.reading.prompt_source import DatasetPrompts
from coati_rl.types import Completion, Prompt, RolloutGroup, SamplingParams, Score
from producer.environments.single_turn import single_turns
from tests.unit.batching.trajectories import FORKED


class DirectCoordinator(Coordinator):
    """Takes groups as they are, and packs them as a producer's loop does."""

    def put(self, producer_id, groups):
        return super().put(producer_id, [PackedGroup.pack(group) for group in groups])


@pytest.fixture
def make_prompts():
    def make(count, name="train"):
        of_set = {} if name == "train" else {"purpose": "eval", "eval_set": name}
        return [Prompt(uid=f"{name}-{i}", token_ids=(1, 2, 3), ground_truth=str(i), **of_set) for i in range(count)]

    return make


@pytest.fixture
def make_settings():
    """By default 1 producer x ibs 4, 1 trainer x tbs 2 (so K = 2), g = 2, lockstep; nothing is filtered."""

    def make(**changes):
        sizes = {"dp": 1, "train_batch_size": 2, "train_minibatch_size": 2, "train_microbatch_size": 4}
        sizes |= {key: changes.pop(key) for key in list(changes) if key in sizes}
        batch = BatchSettings(
            **sizes,
            loss_variation="sample_level",
            advantage_estimator=changes.pop("advantage_estimator", "group_norm"),
            rules=GroupRules(**{"max_new_tokens": 8, **changes.pop("rules", {})}),
        )
        sync = SyncConfig(**{name: changes.pop(name) for name in list(changes) if name in SyncConfig.model_fields})
        values = {
            "sync": sync,
            "sync_period": 2,
            "num_trainers": sizes["dp"],
            "trainers_per_dp_rank": 1,
            "max_steps": None,
            "eval_interval": None,
            "save_interval": None,
            "max_failure_rate": 25.0,
            "dynamic_batching": False,
            "max_empty_groups": 100,
            "seed": 0,
        }
        plans = {
            "train": SamplingPlan(group_size=2, sampling=SamplingParams()),
            "eval": SamplingPlan(group_size=1, sampling=SamplingParams(temperature=0.0)),
        }
        return CoordinatorSettings(batch=batch, sampling_plans=plans, **(values | changes))

    return make


@pytest.fixture
def make_coordinator(make_settings, make_prompts, tmp_path: Path):
    """A coordinator of `make_settings`."""

    def make(
        num_prompts=8,
        *,
        eval_prompts=0,
        num_episodes=1,
        start=None,
        untrained=None,
        recovered=None,
        ledger=None,
        left=None,
        directory=tmp_path,
        **changes,
    ):
        settings = make_settings(**changes)
        source = DatasetPrompts(make_prompts(num_prompts), num_episodes=num_episodes, seed=0)
        tasks = {"arithmetic": make_prompts(eval_prompts, "arithmetic")} if eval_prompts else {}
        evaluation = EvaluationRounds(tasks, directory / "eval", plan=settings.sampling_plans["eval"])
        recorder = RolloutRecorder(directory / "rollouts")
        begins = RunStart(position=start, untrained=untrained, recovered=recovered, probe=(1, 2, 3))
        return DirectCoordinator(settings, source, evaluation, recorder, begins, ledger, left)

    return make


@pytest.fixture
def make_group():
    """A finished group for a lease; rewards 1, 0, 1, 0, ... unless given."""

    def make(
        lease, *, producer=0, version=0, rewards=None, verdict="ok", num_tokens=3, finish_reason="stop", logprob=-0.5
    ):
        rewards = rewards or [float(i % 2 == 0) for i in range(lease.group_size)]
        completion = Completion(
            token_ids=np.arange(num_tokens, dtype=np.int32),
            logprobs=np.full(num_tokens, logprob, dtype=np.float32),
            policy_versions=np.full(num_tokens, version, dtype=np.int32),
            finish_reason=finish_reason,
            text="4",
        )
        return RolloutGroup(
            lease_id=lease.lease_id,
            producer_id=producer,
            prompt=lease.prompt,
            temperature=1.0,
            trajectories=single_turns(lease.prompt, [completion] * lease.group_size, temperature=1.0),
            scores=tuple(
                Score(reward=r, answer_correct=r > 0, format_valid=True, verdict=verdict, detail="") for r in rewards
            ),
        )

    return make


@pytest.fixture
def group_of():
    """A group from its samples, each (reward, response tokens[, verdict[, finish reason]]).

    The prompt is 1, 2, 3; responses 10, 11, ...

    The temperature is 0.7, every logprob -0.5; a reward above 0 is a correct answer.
    """

    def make(samples, *, uid="p0", version=7, finish_reason="stop"):
        samples = [(*sample, *("ok", finish_reason)[len(sample) - 2 :]) for sample in samples]
        prompt = Prompt(uid=uid, token_ids=(1, 2, 3), ground_truth="4")
        completions = [
            Completion(
                token_ids=np.arange(10, 10 + length, dtype=np.int32),
                logprobs=np.full(length, -0.5, dtype=np.float32),
                policy_versions=np.full(length, version, dtype=np.int32),
                finish_reason=finished,
                text="x" * length,
            )
            for _, length, _, finished in samples
        ]
        return RolloutGroup(
            lease_id=0,
            producer_id=0,
            prompt=prompt,
            temperature=0.7,
            trajectories=single_turns(prompt, completions, temperature=0.7),
            scores=tuple(
                Score(reward=reward, answer_correct=reward > 0, format_valid=True, verdict=verdict)
                for reward, _, verdict, _ in samples
            ),
        )

    return make


@pytest.fixture
def forked_group():
    """A group of two episodes, the first of which has a fork; rewards 1 and 0 unless given."""

    def make(trajectories=FORKED, *, uid="p0", rewards=(1.0, 0.0)):
        return RolloutGroup(
            lease_id=0,
            producer_id=0,
            prompt=Prompt(uid=uid, token_ids=(1, 2, 3), ground_truth="4"),
            temperature=0.7,
            trajectories=trajectories,
            scores=tuple(
                Score(reward=reward, answer_correct=reward > 0, format_valid=True, verdict="ok") for reward in rewards
            ),
        )

    return make
