"""Test each preset from rewards to the scalar and its gradient, through the functions of a run, against its paper."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch

from coati_rl.algorithms.advantage import group_advantages
from coati_rl.algorithms.aggregation import loss_scale, token_weight
from coati_rl.algorithms.over_length import over_length_penalty
from coati_rl.algorithms.sums import merge_sums
from coati_rl.algorithms.token_advantages import advantage_sums, subtract_kl_to_go, whiten
from coati_rl.batch import MicroBatch
from coati_rl.build import build_loss
from coati_rl.config import Config
from coati_rl.config.presets import PRESETS
from coati_rl.estimator import load_estimator
from consumer.objectives.run_objective import policy_gradient
from tests.unit.algorithms import paper_objectives as papers
from tests.unit.algorithms.batches import evaluate, lay_out, numbers, to_micro_batch
from tests.unit.algorithms.oracle import VERSION, Sample
from tests.unit.algorithms.paper_objectives import L_MAX, Group, Response

GREEDY_REWARDS = (0.25, 1.0, -0.5)  # of the greedy answer to each prompt
OBJECTIVES: dict[str, Callable[[Sequence[Group]], float]] = {
    "CISPO": papers.cispo,
    "CLIP_COV": papers.clip_cov,
    "DAPO": papers.dapo,
    "DR_GRPO": papers.dr_grpo,
    "GMPO": papers.gmpo,
    "GRPO": papers.grpo,
    "GSPO": papers.gspo,
    "KL_COV": papers.kl_cov,
    "LUSPO": papers.luspo,
    "MAXRL": papers.maxrl,
    "OPO": papers.opo,
    "REINFORCE_PP": papers.reinforce_pp,
    "REMAX": partial(papers.remax, greedy_rewards=GREEDY_REWARDS),
    "REINFORCE_PPB": papers.reinforce_ppb,
    "REINFORCE_PP_BASELINE": papers.reinforce_pp_baseline,
    "RLOO": papers.rloo,
    "SAPO": papers.sapo,
    "VESPO": papers.vespo,
}
OF_RESPONSES = ("GSPO", "LUSPO")  # with narrow bounds
WITH_FIXED_WEIGHTS = ("CISPO", "VESPO")
WITHOUT_CLIP = ("KL_COV", "SAPO", "VESPO")
GROUPS = [  # (reward, tokens) of each response
    [(1.0, 3), (0.0, 1), (1.0, 8), (0.0, 7)],
    [(0.7, 2), (0.7, 4), (0.7, 1), (0.7, 5)],  # nothing to learn from, in a group
    [(0.0, 6), (0.25, 2), (-1.0, 1), (1.0, 3)],
]


def make_groups(algo: str) -> list[list[Response]]:
    """Old policies at distances that the algorithm clips sometimes; float32 numbers, as a run has them."""
    rng = np.random.default_rng(4)
    spread = 6e-4 if algo in OF_RESPONSES else 1.0 if algo == "CISPO" else 0.3
    specs = [GROUPS[0], GROUPS[2]] if algo == "DAPO" else GROUPS  # dynamic sampling replaces a group of equals
    groups = []
    for spec in specs:
        groups.append([])
        for reward, length in spec:
            logprobs = -rng.uniform(0.1, 3, length)
            shared = rng.normal() if algo in OF_RESPONSES else 0.0  # of all tokens: a mean over them must get somewhere
            old = logprobs + spread * (shared + rng.normal(size=length))
            ref = logprobs + 0.3 * rng.normal(size=length)
            arrays = (values.astype(np.float32).astype(np.float64) for values in (logprobs, old, ref))
            groups[-1].append(Response(reward, *arrays))
    return groups


def rewards_of(config: Config, group: Group) -> np.ndarray:
    rewards = [response.reward for response in group]
    cache = config.over_length_cache
    if cache is not None:
        limits = {
            "max_length": config.sampling.max_new_tokens,
            "cache_length": cache,
            "scale": config.algorithm.reward_scale,
        }
        rewards = [r + over_length_penalty(len(response), **limits) for r, response in zip(rewards, group, strict=True)]
    return np.array(rewards)


def make_samples(config: Config, groups: Sequence[Group]) -> list[Sample]:
    samples = []
    for group, greedy_reward in zip(groups, GREEDY_REWARDS, strict=False):
        estimator = load_estimator(config.algorithm.advantage_estimator)
        are_valid, lengths = np.ones(len(group), bool), np.array([len(response) for response in group])
        given = {"estimator": estimator, "lengths": lengths, "baseline": greedy_reward}
        advantages = group_advantages(rewards_of(config, group), are_valid, **given)
        for response, advantage in zip(group, advantages, strict=True):
            length = len(response)
            weight = token_weight(length, config.algorithm.loss_variation, max_length=config.sampling.max_new_tokens)
            samples.append(
                Sample(
                    logprobs=response.logprobs,
                    old_logprobs=response.old_logprobs,
                    rollout_logprobs=response.old_logprobs,
                    ref_logprobs=response.ref_logprobs,
                    entropy=np.zeros(length),
                    advantages=np.full(length, advantage),
                    loss_weights=np.full(length, weight),
                    policy_version=np.full(length, VERSION, np.int32),
                )
            )
    return samples


def score(config: Config, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
    """Change advantages as a trainer does before the loss."""
    if config.algorithm.kl_place == "reward":
        settings = {"kl_coeff": config.algorithm.kl_coeff, "estimator": config.algorithm.kl_estimator}
        micro_batches = [subtract_kl_to_go(micro_batch, **settings)[0] for micro_batch in micro_batches]
    if config.algorithm.whiten_advantages:
        report = {}
        for micro_batch in micro_batches:  # each on a rank of its own
            report = merge_sums(report, advantage_sums([micro_batch]))
        micro_batches = [whiten(micro_batch, numbers(report)) for micro_batch in micro_batches]
    selection = policy_gradient(config).selection
    return micro_batches if selection is None else selection(micro_batches, numbers)


def loss_and_gradient(
    config: Config, groups: Sequence[Group], *, cuts: list[int]
) -> tuple[float, list[np.ndarray], dict[str, float]]:
    """As a run has it: micro-batches at the cuts, one sum over them, one scale."""
    samples = make_samples(config, groups)
    edges = [0, *cuts, len(samples)]
    batches = [lay_out(samples[a:b], seed=a, dtype=torch.float32) for a, b in itertools.pairwise(edges)]
    micro_batches = score(config, [to_micro_batch(batch) for batch in batches])
    scale = loss_scale(len(samples), sum(sample.length for sample in samples), config.algorithm.loss_variation)
    loss, total, report, found = build_loss(config.algorithm), 0.0, {}, []
    for batch, micro_batch in zip(batches, micro_batches, strict=True):
        changed = {"advantages", "left_out", "held"} & micro_batch.loss_arrays.keys()
        arrays = {**batch.arrays, **{name: torch.tensor(micro_batch.loss_arrays[name]) for name in changed}}
        value, sums, gradients = evaluate(loss, arrays)
        total += value
        report = merge_sums(report, sums)
        found += batch.per_sample(gradients["logprobs"])
    return total * scale, [gradient * scale for gradient in found], numbers(report)


def quotients(objective: Callable[[Sequence[Group]], float], groups: Sequence[Group]) -> list[np.ndarray]:
    """The gradient of a paper's objective by central differences."""
    step, gradients = 1e-6, []
    for i, group in enumerate(groups):
        for j, response in enumerate(group):
            gradients.append(np.zeros(len(response)))
            for t in range(len(response)):
                ends = []
                for sign in (1, -1):
                    logprobs = response.logprobs.copy()
                    logprobs[t] += sign * step
                    moved = [list(g) for g in groups]
                    moved[i][j] = dataclasses.replace(response, logprobs=logprobs)
                    ends.append(objective(moved))
                gradients[-1][t] = (ends[0] - ends[1]) / (2 * step)
    return gradients


@functools.cache
def of_paper(algo: str) -> tuple[Sequence[Group], float, list[np.ndarray]]:
    """Groups, and the value and gradient of the paper's objective on them."""
    groups = make_groups(algo)
    objective = partial(OBJECTIVES[algo], sampled=groups) if algo in WITH_FIXED_WEIGHTS else OBJECTIVES[algo]
    return groups, objective(groups), quotients(objective, groups)


def test_every_preset_has_a_paper_here() -> None:
    """PPO has a second model, and its whole step is that of tests/integration/consumer/test_actor_critic.py."""
    assert sorted([*OBJECTIVES, "PPO"]) == sorted(PRESETS)


@pytest.mark.parametrize("cuts", [[], [1, 2, 5]], ids=["together", "split"])
@pytest.mark.parametrize("algo", OBJECTIVES)
def test_value_and_gradient_from_rewards_to_the_scalar_are_the_papers(algo: str, cuts: list[int]) -> None:
    everything = {"token_fraction": 1.0} if algo == "CLIP_COV" else {}  # the preset's share is below a token here
    config = Config(algo=algo, max_new_tokens=L_MAX, **everything)
    groups, of_groups, expected = of_paper(algo)
    value, gradients, report = loss_and_gradient(config, groups, cuts=cuts)
    assert value == pytest.approx(of_groups, rel=2e-5, abs=1e-7)  # terms of size 1 cancel to 1e-5 under GSPO
    largest = max(np.abs(gradient).max() for gradient in gradients)
    for got, wanted in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=1e-5 * largest)
    if algo not in WITHOUT_CLIP:
        assert 0 < report["clip_sum"] < report["num_tokens"]  # the batch shows both sides of the clip
