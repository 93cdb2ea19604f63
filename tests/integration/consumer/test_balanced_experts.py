"""Test that the loss that balances experts gives the plain gradient, and metrics, however rows and ranks are cut."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coati_rl.algorithms.aggregation import LossVariation
from tests.integration.consumer.conftest import save_with_reference
from tests.integration.consumer.expert_models import CLIPPED, EXPERTS
from tests.integration.consumer.expert_process import COEFF, Balanced, take_balanced, taken
from tests.integration.consumer.gradient_matrix import CASES
from tests.integration.consumer.launches import launched
from tests.integration.consumer.losses import Cut
from tests.integration.consumer.plain_training import plain_gradients, ref_logprobs_of
from tests.integration.consumer.samples import MAX_RESPONSE, Sample, plain_model, samples_near
from tests.integration.consumer.test_gradients import differences
from tests.integration.consumer.trainer_server import LAUNCH_TIMEOUT_S, TrainerServers

pytestmark = pytest.mark.timeout(LAUNCH_TIMEOUT_S)
TOLERANCE = 1e-5  # L2 per tensor, relative to the plain gradient's
PADDED, PACKED, SHARED = Cut(1, False, "one"), Cut(4, True, "uneven"), Cut(2, True, "several", True)
FEW = "qwen3_moe, some dense"
ALONE = [
    Balanced(FEW, "dp1", PADDED),
    Balanced(FEW, "dp1", PACKED),
    Balanced(FEW, "dp1", SHARED, recomputes=True),
]
OTHERS = [
    *(Balanced(name, "dp1", cut) for name in EXPERTS for cut in (PADDED, PACKED)),
    *(Balanced(name, "dp1", Cut(size, True, "one", True)) for name in ("qwen3_moe", "olmoe") for size in (1, 2, 4)),
    *(
        Balanced(FEW, layout, cut)
        for layout in ("dp2", "fsdp2_dp2", "pp2", "ep2", "ep2_dp2", "cp2", "cp2_ep2", "cp2_pp2")
        for cut in (PACKED, SHARED)
    ),
    Balanced(FEW, "fsdp2_dp2", SHARED, recomputes=True),
    Balanced(FEW, "ep2", SHARED, recomputes=True),
    Balanced(FEW, "cp2", SHARED, recomputes=True),
    Balanced(FEW, "pp2", SHARED, recomputes=True),
]


@pytest.fixture(scope="module")
def model_root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    for name in EXPERTS if request.config.getoption("--all") else [FEW]:
        architecture, settings = EXPERTS[name]
        save_with_reference(root / name, architecture, **settings)
    return root


@functools.cache
def plain(model_dir: Path) -> dict[str, Tensor]:
    """The gradient of a step's loss, with the balancing loss of each sample by itself."""
    model, case = copy.deepcopy(plain_model(model_dir)), CASES[CLIPPED]
    samples = samples_near(model_dir, 0, recomputes_old=case.recomputes_old, kind=case.kind)
    found = plain_gradients(model, samples, ref_logprobs_of(model_dir, 0, case.kind), case.formula, case.aggregation, 1)
    balancing = sum(weight_of(sample, samples, case.aggregation) * balance_of(model, sample) for sample in samples)
    (COEFF * balancing).backward()
    return {name: found[1][name] + (0 if each.grad is None else each.grad) for name, each in model.named_parameters()}


def weight_of(sample: Sample, samples: tuple[Sample, ...], aggregation: LossVariation) -> float:
    """Of a sample in the mean over samples, as the loss weighs its tokens."""
    return {
        "sample_level": 1 / len(samples),
        "token_level": sample.num_counted / sum(each.num_counted for each in samples),
        "constant": sample.num_counted / MAX_RESPONSE / len(samples),
    }[aggregation]


def balance_of(model: Any, sample: Sample) -> Tensor:
    """The mean over layers: E / K * sum over experts of the share of tokens and the mean probability."""
    logits: list[Tensor] = []
    routers = [each for name, each in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [each.register_forward_hook(lambda _, __, outputs: logits.append(outputs)) for each in routers]
    model(input_ids=torch.tensor(sample.token_ids)[None, :-1])
    for hook in hooks:
        hook.remove()
    losses = []
    for each, _, selected in logits:
        probabilities = each.view(-1, each.shape[-1]).softmax(-1)
        num_tokens, num_experts = probabilities.shape
        loss = torch.zeros(())
        for expert in range(num_experts):
            share = (selected == expert).sum() / num_tokens
            loss = loss + num_experts / selected.shape[-1] * share * probabilities[:, expert].mean()
        losses.append(loss)
    return torch.stack(losses).mean()


def check(found: dict[str, Any], right: dict[str, Tensor]) -> None:
    gaps = differences(found["gradients"], {name: right[name] for name in found["gradients"]})
    assert max(gaps.values()) < TOLERANCE, gaps


@pytest.mark.parametrize("trial", ALONE, ids=lambda each: each.name)
def test_the_balancing_loss_does_not_depend_on_rows_and_micro_batches(model_root: Path, trial: Balanced) -> None:
    found = taken(trial, model_root)
    check(found, plain(model_root / trial.model))
    without = taken(trial._replace(coeff=0.0), model_root)
    assert without["metrics"] == pytest.approx(found["metrics"], rel=1e-5)
    gaps = differences(without["gradients"], plain(model_root / trial.model))
    assert gaps["model.layers.0.mlp.gate.weight"] > 0.1  # it acts
    assert found["metrics"]["router_load_max"] > 1
    assert 0.9 < found["metrics"]["aux_loss"] < 3


@pytest.fixture(scope="module")
def ranks(
    trainers: TrainerServers, model_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Balanced], list[dict[str, Any]]]:
    out_dir = tmp_path_factory.mktemp("balanced")
    return functools.cache(lambda: launched(trainers, take_balanced, out_dir, model_root, OTHERS))


@pytest.mark.full
@pytest.mark.parametrize("trial", OTHERS, ids=lambda each: each.name)
def test_every_layout_gives_the_plain_gradient_and_metrics(model_root: Path, ranks: Any, trial: Balanced) -> None:
    found = ranks()[trial]
    right = plain(model_root / trial.model)
    assert {name for each in found for name in each["gradients"]} == right.keys()
    for each in found:
        check(each, right)
        assert each["metrics"] == pytest.approx(found[0]["metrics"])
        if trial.layout != "dp1" and not trial.cut.shared:
            alone = Balanced(trial.model, "dp1", trial.cut)
            assert each["metrics"] == pytest.approx(ranks()[alone][0]["metrics"], rel=1e-6)
