"""Test that policy and critic have the gradients of plain transformers in every layout, and go on from a checkpoint.

The oracle is AutoModelForCausalLM and a classifier of transformers, one sample at a time in float32, with the formulae
of arXiv:1506.02438 and of PPO's code written out.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from tests.integration.consumer.actor_critic_process import (
    CLIP,
    DISCOUNT,
    TRACE,
    VALUE,
    Trial,
    reward_of,
    take_steps,
)
from tests.integration.consumer.conftest import CONTEXT, FULLY_SHARDED, LAYOUTS, MAX_GRAD_NORM, save_model
from tests.integration.consumer.launches import launched
from tests.integration.consumer.losses import Cut
from tests.integration.consumer.samples import Sample, plain_model, sample_logprobs, samples_near, scale_of
from tests.integration.consumer.trainer_server import LAUNCH_TIMEOUT_S, TrainerServers

pytestmark = pytest.mark.timeout(LAUNCH_TIMEOUT_S)
CRITICS: dict[str, Any] = {"tied": AutoModelForSequenceClassification, "untied": AutoModelForTokenClassification}
TOLERANCE = {"fp32": 1e-5, "bf16": 2.5e-2}
CUTS = (Cut(1, True, "one"), Cut(2, True, "uneven"), Cut(4, False, "several"), Cut(4, True, "one", shared=True))
KINDS = ("plain", "holes", "forked")
OF_LAYOUTS = [
    Trial(layout, "bf16" if "zero" in layout else "fp32", KINDS[number % 3], CUTS[(number + 3) % 4])
    for number, layout in enumerate((*LAYOUTS, *CONTEXT, *FULLY_SHARDED))
]
OF_CUTS = [Trial("dp1", "fp32", kind, cut) for kind in KINDS for cut in CUTS]
UNTIED = [each._replace(is_tied=False) for each in (OF_CUTS[1], *OF_LAYOUTS)]
# The same samples in 1, 2 and 4 micro-batches, and on two ranks.
SPLITS = [Trial("dp1", "fp32", "plain", Cut(size, True, "one")) for size in (4, 2, 1)]
SPLITS += [Trial("dp2", "fp32", "plain", Cut(2, True, "one"))]
FAST = [each for each in OF_CUTS if (KINDS.index(each.kind) + CUTS.index(each.cut)) % 4 == 0]
FAST += [SPLITS[0], SPLITS[3]]
FAST += [each for each in UNTIED if each.layout == "tp2"]
TRIALS = [*FAST, *(each for each in (*SPLITS, *OF_CUTS, *OF_LAYOUTS, *UNTIED) if each not in FAST)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy with a tied LM head and a critic without a bias, and a policy with its own and a critic with a bias."""
    models = tmp_path_factory.mktemp("models")
    for name, critic_class in CRITICS.items():
        directory = save_model(models / name, tied=name == "tied")
        critic = critic_class.from_pretrained(directory, num_labels=1)
        torch.manual_seed(9)
        critic.score.weight.data.normal_().div_(8)
        if critic.score.bias is not None:
            critic.score.bias.data.fill_(0.25)
        critic.config.pad_token_id = 0
        critic.save_pretrained(directory / VALUE)
    return models


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    trainers: TrainerServers,
    models: Path,
) -> dict[Trial, list[dict[str, Any]]]:
    """What each rank recorded, of the trials that pytest was asked for."""
    out_dir = tmp_path_factory.mktemp("actor-critic")
    due = TRIALS if request.config.getoption("--all") else FAST
    return launched(trainers, take_steps, out_dir, models, due)


def marked(trials: list[Trial]) -> list[Any]:
    return [pytest.param(each, id=each.name, marks=[] if each in FAST else pytest.mark.full) for each in trials]


def plain_gradients(model_dir: Path, kind: str) -> tuple[dict[str, dict[str, Tensor]], dict[str, float]]:
    """Both models' gradients of the first step, and its metrics."""
    policy = plain_model(model_dir)
    critic = CRITICS[model_dir.name].from_pretrained(model_dir / VALUE, attn_implementation="eager").eval()
    samples = samples_near(model_dir, 0, kind=kind)
    scale, value_loss, all_returns, all_values = scale_of(samples, "token_level"), 0.0, [], []
    for sample in samples:
        counted = torch.tensor(sample.counted)
        values = values_of(critic, sample)[counted]
        old = values.detach()
        advantages = torch.tensor(advantages_of(sample, old.double().numpy()), dtype=torch.float32)
        returns = advantages + old
        if sample.token_ids[sample.num_prompt :][sample.counted][-1] % 2:  # cut
            returns[-1] = old[-1]
        ratio = torch.exp(sample_logprobs(policy, sample) - torch.tensor(sample.rollout_logprobs))[counted]
        terms = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        (scale * terms.sum()).backward()
        near = old + (values - old).clamp(-CLIP, CLIP)
        errors = 0.5 * torch.max((values - returns) ** 2, (near - returns) ** 2)
        (scale * errors.sum()).backward()
        value_loss += scale * errors.sum().item()
        all_returns += returns.tolist()
        all_values += old.tolist()
    gradients = {
        role: {name: p.grad.clone() for name, p in model.named_parameters()}
        for role, model in (("policy", policy), ("value", critic))
    }
    policy.zero_grad()
    left = np.var(np.array(all_returns) - np.array(all_values)) / np.var(all_returns)
    return gradients, {
        "value_loss": value_loss,
        "explained_variance": 1 - left,
        "return_mean": float(np.mean(all_returns)),
    }


def values_of(critic: Any, sample: Sample) -> Tensor:
    """float32[T - num_prompt], of the states before the response's tokens; no temperature divides them."""
    hidden = critic.model(input_ids=torch.tensor(sample.token_ids)[None]).last_hidden_state[0]
    return critic.score(hidden[sample.num_prompt - 1 : -1].float()).squeeze(-1)


def advantages_of(sample: Sample, values: np.ndarray) -> list[float]:
    token_ids = sample.token_ids[sample.num_prompt :][sample.counted]
    rewards, count = reward_of(token_ids).astype(np.float32).tolist(), len(token_ids)
    after = [*values[1:], values[-1] if token_ids[-1] % 2 else 0.0]
    deltas = [r + DISCOUNT * v_next - v for r, v_next, v in zip(rewards, after, values, strict=True)]
    return [sum((DISCOUNT * TRACE) ** (s - t) * deltas[s] for s in range(t, count)) for t in range(count)]


def whole(ranks: list[dict[str, Any]], step: int, what: str) -> dict[str, Tensor]:
    return {name: tensor for rank in ranks for name, tensor in rank["steps"][step][what].items()}


@pytest.mark.parametrize("trial", marked(TRIALS))
def test_both_gradients_are_those_of_plain_transformers(trial: Trial, found: Any, models: Path) -> None:
    right, metrics = plain_gradients(trial.model_dir(models), trial.kind)
    tolerance = TOLERANCE[trial.precision]
    for role, gradients in right.items():
        joined = whole(found[trial], 0, f"{role} gradients")
        assert joined.keys() == gradients.keys()
        worst = max(
            (float((joined[name] - gradient).norm() / gradient.norm()), name) for name, gradient in gradients.items()
        )
        assert worst[0] < tolerance, (role, worst)
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
        for rank in found[trial]:
            assert rank["steps"][0][f"{role} norm"] == pytest.approx(float(norm), rel=tolerance)
            assert rank["steps"][0][f"{role} norm"] > MAX_GRAD_NORM  # clipping takes part
    reported = [rank["steps"][0]["metrics"] for rank in found[trial] if "value_loss" in rank["steps"][0]["metrics"]]
    assert reported
    for each in reported:
        assert {name: each[name] for name in metrics} == pytest.approx(metrics, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("trial", marked(SPLITS[1:]))
def test_split_both_gradients_are_the_same_in_1_2_and_4_micro_batches_and_on_two_ranks(
    trial: Trial, found: Any
) -> None:
    for role in ("policy", "value"):
        one, several = (whole(found[each], 0, f"{role} gradients") for each in (SPLITS[0], trial))
        left = torch.cat([(several[name] - gradient).flatten() for name, gradient in one.items()]).norm()
        assert left / torch.cat([gradient.flatten() for gradient in one.values()]).norm() < 1e-6


@pytest.mark.parametrize("trial", marked(TRIALS))
def test_a_step_from_the_checkpoint_has_the_same_bits(trial: Trial, found: Any) -> None:
    for rank in found[trial]:
        second, again = rank["steps"][1], rank["resumed"]
        for role in ("policy", "value"):
            weights = second["weights"][role]
            assert all(torch.equal(weights[name], weight) for name, weight in again["weights"][role].items())
            assert again["weights"][role].keys() == weights.keys()
            assert again[f"{role} norm"] == second[f"{role} norm"]


@pytest.mark.parametrize("trial", marked([each for each in TRIALS if each.precision == "fp32"]))
def test_both_models_move_each_at_its_rate(trial: Trial, found: Any) -> None:
    moved = {}
    for role in ("policy", "value"):
        before, after = (
            {name: w for rank in found[trial] for name, w in rank["steps"][step]["weights"][role].items()}
            for step in (0, 1)
        )
        moved[role] = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert 0 < moved["policy"] < moved["value"]
