"""Test that replayed routes give the gradient of plain transformers with its selection forced, in every layout."""

import copy
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.consumer.conftest import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    WEIGHT_DECAY,
    decay_groups,
    save_with_reference,
)
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
from tests.integration.consumer.test_gradients import MASTER_TOLERANCE, TOLERANCE, differences
from tests.integration.consumer.trainer_server import LAUNCH_TIMEOUT_S, TrainerServers

pytestmark = pytest.mark.timeout(LAUNCH_TIMEOUT_S)
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
# With equal choices bfloat16 differs by rounding alone. ZeRO has no other precision.
ROUNDED = [
    *(
        Replayed(name, layout, precision="bf16")
        for name in EXPERTS
        for layout in ("dp1", "fsdp2_dp2", "zero1_dp2", "zero2_dp2", "ep2")
    ),
    *(
        Replayed("qwen3_moe", layout, shared=True, precision="bf16")
        for layout in ("dp2", "tp2", "pp2", "cp2_zero1", "tp2_zero1_dp2", "tp2_zero2_dp2", "pp2_zero1_dp2", "ep2_dp2")
    ),
]


@pytest.fixture(scope="module")
def model_root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    for name in EXPERTS if request.config.getoption("--all") else [FIRST.model]:
        architecture, settings = EXPERTS[name]
        save_with_reference(root / name, architecture, **settings)
    return root


@contextmanager
def forced(model: Any, name: str, unknown_share: float) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Have the routers of a plain model select by `routes_for` the tokens; what they would select is recorded."""
    routes: list[Tensor] = []
    seen: list[tuple[Tensor, Tensor]] = []

    def begin(_: Any, __: Any, arguments: dict[str, Any]) -> None:
        token_ids = arguments["input_ids"][0].numpy()
        routes[:] = [torch.tensor(routes_for(model.config, token_ids, unknown_share).astype("int64"))]

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
def plain(model_dir: Path, name: str, coeff: float, unknown_share: float) -> dict[str, Any]:
    model, samples = copy.deepcopy(plain_model(model_dir)), samples_of(model_dir)
    references = ref_logprobs_of(model_dir, 0, CASE.kind)  # the reference has no engine whose routes it would have
    with forced(model, name, unknown_share):
        _, gradients = plain_gradients(model, samples, references, CASE.formula, CASE.aggregation, 1)
        if coeff:
            # Its counts are of what is computed; `balance_of` reads them from the last hook's outputs.
            balancing = sum(weight_of(each, samples, CASE.aggregation) * balance_of(model, each) for each in samples)
            (coeff * balancing).backward()
            gradients = {key: gradients[key] + (0 if p.grad is None else p.grad) for key, p in model.named_parameters()}
    with forced(model, name, unknown_share) as seen, torch.no_grad():
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


def plain_of(trial: Replayed, model_root: Path) -> dict[str, Any]:
    return plain(model_root / trial.model, trial.model, trial.coeff, trial.unknown_share)


def stepped(model_dir: Path, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The plain model's weights after a step of torch's AdamW."""
    model = copy.deepcopy(plain_model(model_dir))
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].clone()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    torch.optim.AdamW(decay_groups(model), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY).step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def check(found: dict[str, Any], right: dict[str, Any], precision: str = "fp32") -> None:
    gaps = differences(found["gradients"], {name: right["gradients"][name] for name in found["gradients"]})
    assert max(gaps.values()) < TOLERANCE[precision], gaps


def test_replayed_routes_give_the_gradient_of_a_forced_selection(model_root: Path) -> None:
    found, model_dir = replayed(FIRST, model_root / FIRST.model), model_root / FIRST.model
    right = plain_of(FIRST, model_root)
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
    return functools.cache(lambda: launched(trainers, take_replayed, out_dir, model_root, OTHERS + ROUNDED))


@pytest.mark.full
@pytest.mark.parametrize("trial", OTHERS, ids=lambda each: each.name)
def test_every_layout_replays_them(model_root: Path, ranks: Any, trial: Replayed) -> None:
    right = plain_of(trial, model_root)
    assert {name for each in ranks()[trial] for name in each["gradients"]} == right["gradients"].keys()
    for each in ranks()[trial]:
        check(each, right)
        if not trial.shared:  # tokens that are computed once count once there
            names = ("route_missing", "route_mismatch")
            assert {name: each["metrics"][name] for name in names} == pytest.approx(right["metrics"], rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("trial", ROUNDED, ids=lambda each: each.name)
def test_experts_step_in_bfloat16_as_plain_training_does(model_root: Path, ranks: Any, trial: Replayed) -> None:
    right = plain_of(trial, model_root)
    start = plain_model(model_root / trial.model).state_dict()
    end = stepped(model_root / trial.model, right["gradients"])
    held = set[str]()
    for each in ranks()[trial]:
        check(each, right, "bf16")
        assert each["metrics"]["route_missing"] == 0
        names = each["masters"].keys()
        moved, apart = (
            math.hypot(*((end[name] - other[name]).norm() for name in names)) for other in (start, each["masters"])
        )
        assert apart < MASTER_TOLERANCE["bf16"] * moved
        held |= names
    assert held == right["gradients"].keys()
