"""Test that replayed routes give the gradient of plain transformers with its selection forced, in every layout."""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.consumer.conftest import save_with_reference
from tests.integration.consumer.expert_models import EXPERTS
from tests.integration.consumer.launches import launched
from tests.integration.consumer.plain_training import plain_gradients, ref_logprobs_of
from tests.integration.consumer.replay_of_routes import (
    CASE,
    UNKNOWN_SHARE,
    Replayed,
    replayed,
    routes_for,
    samples_of,
    take_replayed,
)
from tests.integration.consumer.samples import plain_model, sample_logprobs
from tests.integration.consumer.test_balanced_experts import balance_of, weight_of
from tests.integration.consumer.test_gradients import differences
from tests.integration.consumer.trainer_server import LAUNCH_TIMEOUT_S, TrainerServers

pytestmark = pytest.mark.timeout(LAUNCH_TIMEOUT_S)
TOLERANCE = 1e-5  # L2 per tensor, relative to the plain gradient's
COEFF = 5.0
# Whether a token's weights add up to 1, as the models' papers have it.
NORMALISES = {
    "qwen3_moe": True,
    "qwen3_moe, some dense": False,
    "qwen2_moe": False,
    "mixtral": True,
    "olmoe": False,
    "deepseek_v2": False,
}
FIRST = Replayed("qwen3_moe", shared=True, recomputes=True)
OTHERS = [
    *(Replayed(name, packed=packed) for name in EXPERTS for packed in (False, True)),
    *(
        Replayed("qwen3_moe", layout, shared=shared)
        for layout in ("dp2", "tp2", "pp2", "fsdp2_dp2", "ep2", "ep2_dp2", "fsdp2_tp2", "tp2_pp2", "cp2")
        for shared in (False, True)
    ),
    Replayed("qwen3_moe", shared=True, coeff=COEFF),
    Replayed("qwen3_moe", "ep2", coeff=COEFF),
]


@pytest.fixture(scope="module")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    for name, (architecture, settings) in EXPERTS.items():
        save_with_reference(root / name, architecture, **settings)
    return root


@contextmanager
def forced(model: Any, name: str) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Have the routers of a plain model select by `routes_for` the tokens; what they would select is recorded."""
    routes: list[Tensor] = []
    seen: list[tuple[Tensor, Tensor]] = []

    def begin(_: Any, __: Any, arguments: dict[str, Any]) -> None:
        token_ids = arguments["input_ids"][0].numpy()
        routes[:] = [torch.tensor(routes_for(model.config, token_ids).astype("int64"))]

    def select(layer: int, outputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, _, selected = outputs
        of_layer = routes[0][:, layer]
        chosen = torch.where(of_layer == 255, selected, of_layer)
        seen.append((of_layer, selected))
        every = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
        picked = torch.stack([every[row, experts] for row, experts in enumerate(chosen)])
        return logits, picked / picked.sum(-1, keepdim=True) if NORMALISES[name] else picked, chosen

    handles = [model.register_forward_pre_hook(begin, with_kwargs=True)]
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            hook = functools.partial(lambda at, _, __, outputs: select(at, outputs), number)
            handles.append(layer.mlp.gate.register_forward_hook(hook))
    yield seen
    for handle in handles:
        handle.remove()


@functools.cache
def plain(model_dir: Path, name: str, coeff: float) -> dict[str, Any]:
    model, samples = copy.deepcopy(plain_model(model_dir)), samples_of(model_dir)
    references = ref_logprobs_of(model_dir, 0, CASE.kind)  # the reference has no engine whose routes it would have
    with forced(model, name):
        _, gradients = plain_gradients(model, samples, references, CASE.formula, CASE.aggregation, 1)
        if coeff:
            # Its counts are of what is computed; `balance_of` reads them from the last hook's outputs.
            balancing = sum(weight_of(each, samples, CASE.aggregation) * balance_of(model, each) for each in samples)
            (coeff * balancing).backward()
            gradients = {key: gradients[key] + (0 if p.grad is None else p.grad) for key, p in model.named_parameters()}
    with forced(model, name) as seen, torch.no_grad():
        scores = [sample_logprobs(model, sample) for sample in samples]
    known = [of_layer[:-1, 0] < 255 for of_layer, _ in seen]  # the last token predicts none
    others = [
        (of_layer[:-1, :, None] != own[:-1, None]).all(-1)[is_known]
        for (of_layer, own), is_known in zip(seen, known, strict=True)
    ]
    metrics = {
        "route_missing": 1 - float(torch.cat(known).float().mean()),
        "route_mismatch": float(torch.cat(others).float().mean()),
    }
    return {"gradients": gradients, "scores": torch.cat(scores), "metrics": metrics}


def check(found: dict[str, Any], right: dict[str, Any]) -> None:
    gaps = differences(found["gradients"], {name: right["gradients"][name] for name in found["gradients"]})
    assert max(gaps.values()) < TOLERANCE, gaps


def test_replayed_routes_give_the_gradient_of_a_forced_selection(model_root: Path) -> None:
    found, model_dir = replayed(FIRST, model_root / FIRST.model), model_root / FIRST.model
    right = plain(model_dir, FIRST.model, 0.0)
    check(found, right)
    scores = torch.cat([each[each != 0] for each in found["scores"]])  # 0 where the loss counts no token
    assert (scores.sort().values - right["scores"].sort().values).abs().max() < 1e-5
    assert found["metrics"]["route_missing"] == pytest.approx(UNKNOWN_SHARE, abs=0.05)
    assert found["metrics"]["route_mismatch"] > 0.5  # of six experts two are drawn
    measured = replayed(FIRST._replace(mode="measure", shared=False), model_dir)
    gaps = differences(measured["gradients"], right["gradients"])
    assert gaps["model.layers.0.mlp.gate.weight"] > 0.1  # the choice matters


@pytest.fixture(scope="module")
def ranks(
    trainers: TrainerServers, model_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], dict[Replayed, list[dict[str, Any]]]]:
    out_dir = tmp_path_factory.mktemp("replayed")
    return functools.cache(lambda: launched(trainers, take_replayed, out_dir, model_root, OTHERS))


@pytest.mark.full
@pytest.mark.parametrize("trial", OTHERS, ids=lambda each: each.name)
def test_every_layout_replays_them(model_root: Path, ranks: Any, trial: Replayed) -> None:
    right = plain(model_root / trial.model, trial.model, trial.coeff)
    assert {name for each in ranks()[trial] for name in each["gradients"]} == right["gradients"].keys()
    for each in ranks()[trial]:
        check(each, right)
        if not trial.shared:  # tokens that are computed once count once there
            names = ("route_missing", "route_mismatch")
            assert {name: each["metrics"][name] for name in names} == pytest.approx(right["metrics"], rel=1e-5)
