"""Test that the gradient of reward objectives is that of plain training, in every trainer layout and way of cutting."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.consumer.conftest import CONTEXT, EVERY_LAYOUT, LAYOUTS, MAX_GRAD_NORM, NUM_STEPS
from tests.integration.consumer.reward_cases import CASES, plain_model, plain_training, save_reward_model
from tests.integration.consumer.reward_process import CUTS, take_reward_steps
from tests.integration.consumer.test_gradients import NORM_TOLERANCE, differences, join, norm_of
from tests.integration.consumer.trainer_server import LAUNCH_TIMEOUT_S, TrainerServers

pytestmark = pytest.mark.timeout(LAUNCH_TIMEOUT_S)
GRADIENT_TOLERANCE = {"fp32": 1e-5, "bf16": 2.5e-2}  # L2 per tensor, relative to its norm
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}
UPDATE_TOLERANCE = {"fp32": 2e-3, "bf16": 0.2}  # of what two steps made of all masters; see test_gradients.py
RUNS = [run for run in itertools.product(LAYOUTS, ("fp32", "bf16")) if not ("zero" in run[0] and run[1] == "fp32")]
RUNS += [(layout, "bf16" if "zero" in layout else "fp32") for layout in CONTEXT]
FAST = (("dp1", "fp32"),)
MODELS = (("qwen3", True), ("llama", False))  # architecture and tying, in turns


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("reward_models")
    return [save_reward_model(root / name, name, tied=tied) for name, tied in MODELS]


def joined(ranks: list[dict[Any, Any]], name: str, cut: Any, step: int, what: str, *, is_sliced: bool) -> Any:
    """The whole tensors of the model from what each rank holds of them."""
    parts: dict[str, dict[int, dict[int, Tensor]]] = {}
    for rank in ranks:
        dp_rank, _, tp_rank = rank["place"]
        for key, tensor in rank[name, tuple(cut)][step][what].items():
            parts.setdefault(key, {}).setdefault(tp_rank, {})[dp_rank] = tensor
    shards = {key: shard for rank in ranks for key, shard in rank[name, "shards"].items()}
    return {key: join(by_rank, *shards[key], is_sliced=is_sliced) for key, by_rank in parts.items()}


@pytest.mark.parametrize(
    "run", [run if run in FAST else pytest.param(run, marks=pytest.mark.full) for run in RUNS], ids="-".join
)
def test_every_cut_gives_the_plain_gradient_update_and_metrics(
    trainers: TrainerServers, model_dirs: list[Path], tmp_path: Path, run: tuple[str, str]
) -> None:
    layout, precision = run
    model_dir = model_dirs[[*EVERY_LAYOUT].index(layout) % 2]
    world_size, settings = EVERY_LAYOUT[layout]
    trainers.launch_and_check(take_reward_steps, tmp_path, model_dir, [run], world_size=world_size)
    ranks = [torch.load(tmp_path / f"{'-'.join(run)}-rank{rank}.pt") for rank in range(world_size)]
    is_sliced = settings.get("zero_stage", 0) > 0 or settings.get("plugin") == "fsdp2"
    last_stage = settings.get("pp_size", 1) - 1
    for name, cut in itertools.product(CASES, CUTS):
        right = plain_training(name, model_dir, precision)
        start = plain_start(name, model_dir)
        for step in range(NUM_STEPS):
            gradients = joined(ranks, name, cut, step, "gradients", is_sliced=is_sliced)
            found = differences(gradients, right[step]["gradients"])
            assert max(found.values()) < GRADIENT_TOLERANCE[precision], (name, cut, step, found)
            norm = norm_of(gradients)
            for rank in ranks:
                result = rank[name, tuple(cut)][step]
                assert result["norm"] == pytest.approx(norm, rel=NORM_TOLERANCE)
                assert result["norm"] > MAX_GRAD_NORM
                if rank["place"][1] < last_stage:
                    assert result["metrics"] == {}
                else:
                    assert result["metrics"]["loss"] == pytest.approx(
                        right[step]["loss"], rel=LOSS_TOLERANCE[precision]
                    )
        masters = joined(ranks, name, cut, NUM_STEPS - 1, "masters", is_sliced=is_sliced)
        moved = math.hypot(*(float((right[-1]["masters"][key] - start[key]).norm()) for key in masters))
        apart = math.hypot(*(float((right[-1]["masters"][key] - masters[key]).norm()) for key in masters))
        assert apart < UPDATE_TOLERANCE[precision] * moved, (name, cut)


def plain_start(name: str, model_dir: Path) -> dict[str, Tensor]:
    return {key: p.detach() for key, p in plain_model(CASES[name], model_dir).named_parameters()}
