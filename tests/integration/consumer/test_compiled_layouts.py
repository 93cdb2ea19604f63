"""Test that trainers with compiled operations have the gradients of one that computes them as they are."""

import pytest
import torch

from tests.integration.consumer.conftest import LAYOUTS, save_with_reference
from tests.integration.consumer.trainer_server import LAUNCH_TIMEOUT_S, TrainerServers
from tests.integration.gpu.layout_process import Case, take_steps

CASES = [
    Case("dp1", "bf16", True, True),
    Case("tp2", "fp32", False, True),
    Case("pp2", "bf16", False, True),
    Case("zero1_dp2", "bf16", True, True),
    Case("fsdp2_dp2", "fp32", True, True),
]
TOLERANCE = {"fp32": 1e-5, "bf16": 2.5e-2}  # L2 per tensor, relative; those of the gradient matrix


@pytest.mark.full
@pytest.mark.timeout(LAUNCH_TIMEOUT_S)
def test_gradients_are_those_of_operations_as_they_are(tmp_path) -> None:
    model_dir, trainers = save_with_reference(tmp_path / "model", "qwen3", tied=True), TrainerServers(tmp_path)
    eager = [Case("dp1", case.precision, case.is_shared, False) for case in CASES]
    try:
        for world_size in (1, 2):
            of_size = [case for case in (*CASES, *eager) if LAYOUTS[case.layout][0] == world_size]
            trainers.launch_and_check(take_steps, tmp_path, model_dir, of_size, "cpu", world_size=world_size)
    finally:
        trainers.close()
    for case, plain in zip(CASES, eager, strict=True):
        expected = torch.load(tmp_path / plain.file("cpu", 0))["steps"]
        for rank in range(LAYOUTS[case.layout][0]):
            found = torch.load(tmp_path / case.file("cpu", rank))["steps"]
            for step, right in zip(found, expected, strict=True):
                assert step["norm"] == pytest.approx(right["norm"], rel=TOLERANCE[case.precision])
                for name, gradient in step["gradients"].items():
                    distance = (gradient - right["gradients"][name]).norm() / right["gradients"][name].norm()
                    assert distance < TOLERANCE[case.precision], (case, rank, name)
