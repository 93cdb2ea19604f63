"""Test that mixtures of experts get plain transformers' gradients, by tensor, however rows and ranks are cut."""

import functools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.consumer.conftest import EVERY_LAYOUT, NUM_STEPS, save_with_reference
from tests.integration.consumer.expert_models import EXPERTS, RUNS_OF_EXPERTS
from tests.integration.consumer.expert_process import resume_in, save_after_a_step
from tests.integration.consumer.gradient_matrix import Run
from tests.integration.consumer.gradient_process import take_trials
from tests.integration.consumer.test_gradients import Trained, differences, norm_of
from tests.integration.consumer.test_lifecycle import all_equal, tensors_in
from tests.integration.consumer.trainer_server import LAUNCH_TIMEOUT_S, TrainerServers

pytestmark = [pytest.mark.full, pytest.mark.timeout(LAUNCH_TIMEOUT_S)]
TOLERANCE = 1e-5  # L2 per tensor, relative to the plain gradient's


@pytest.fixture(scope="module")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    for name, (architecture, settings) in EXPERTS.items():
        save_with_reference(root / name, architecture, **settings)
    return root


@pytest.fixture(scope="module")
def trained(
    trainers: TrainerServers, model_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Run], Trained]:
    out_dir = tmp_path_factory.mktemp("gradients")

    @functools.cache
    def launch(world_size: int) -> None:
        due = [each for each in RUNS_OF_EXPERTS if EVERY_LAYOUT[each[0].layout][0] == world_size]
        trainers.launch_and_check(take_trials, out_dir, model_root, due, world_size=world_size)

    @functools.cache
    def results(run: Run) -> Trained:
        launch(run.world_size)
        return Trained(model_root, run, dict(RUNS_OF_EXPERTS)[run], out_dir)

    return results


@pytest.mark.parametrize("run", [run for run, _ in RUNS_OF_EXPERTS], ids="-".join)
def test_experts_and_routers_get_the_plain_gradient_for_two_steps(trained: Callable[[Run], Trained], run: Run) -> None:
    results = trained(run)
    for trial, ranks, right in results:
        for step in range(NUM_STEPS):
            gradients = results.joined(trial, step, "gradients")
            found = differences(gradients, right[step]["gradients"])
            assert any("experts.gate_up_proj" in name for name in found)
            assert max(found.values()) < TOLERANCE, (trial, step, found)
            assert all(steps[step]["norm"] == pytest.approx(norm_of(gradients), rel=TOLERANCE) for steps in ranks)


@pytest.mark.parametrize("layout", ["ep2", "ep2_dp2"])
def test_shared_out_experts_resume_bit_for_bit_and_move_to_other_layouts(
    trainers: TrainerServers, model_root: Path, tmp_path: Path, layout: str
) -> None:
    """A checkpoint has the names and bits of any other layout's; the optimizer's states are those of whole tensors."""
    model_dir, saved = model_root / "qwen3_moe", tmp_path / "step-1"
    trainers.launch_and_check(save_after_a_step, tmp_path, model_dir, layout, world_size=EVERY_LAYOUT[layout][0])
    names = {name for path in sorted(saved.glob("model*.safetensors")) for name in load_file(path)}
    assert names == load_file(model_dir / "model.safetensors").keys()
    before, whole = (torch.load(tmp_path / f"{name}-rank0.pt") for name in ("saved", "uninterrupted"))
    for other in (layout, "fsdp2_dp2", "dp1"):
        again = tmp_path / other / "step-1"
        trainers.launch_and_check(resume_in, tmp_path / other, saved, other, world_size=EVERY_LAYOUT[other][0])
        assert all_equal(tensors_in(again), tensors_in(saved))
        found = torch.load(tmp_path / other / "state-rank0.pt")
        apart = {name: (found[name] - whole[name]).norm() for name in whole}
        assert other != layout or not any(apart.values())
        moved = math.hypot(*((whole[name] - each).norm() for name, each in before.items()))
        assert math.hypot(*apart.values()) < 1e-4 * moved
