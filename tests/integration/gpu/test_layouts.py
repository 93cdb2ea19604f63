"""Test that trainers on GPUs have the gradients and weights of one process on the CPU, in every layout."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.consumer.conftest import LAYOUTS, save_with_reference
from tests.integration.consumer.trainer_server import LAUNCH_TIMEOUT_S, TrainerServers
from tests.integration.gpu.layout_process import Case, take_steps

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(LAUNCH_TIMEOUT_S)]
TOLERANCE = {"fp32": 1e-5, "bf16": 2.5e-2}  # L2 per tensor, relative; those of the gradient matrix
# Every layout in bfloat16, with shared prefixes by turns; those that sum in float32 in float32 as well.
CASES = [Case(layout, "bf16", index % 2 == 0) for index, layout in enumerate(LAYOUTS)]
CASES += [Case(layout, "fp32", index % 2 == 1) for index, layout in enumerate(LAYOUTS) if "zero" not in layout]
RIGHT = [Case("dp1", precision, is_shared) for precision in TOLERANCE for is_shared in (False, True)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_reference(tmp_path_factory.mktemp("model"), "qwen3", tied=True)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> dict[Case, Any]:
    """The steps of one process on the CPU."""
    out_dir = tmp_path_factory.mktemp("cpu")
    trainers = TrainerServers(out_dir)
    try:
        trainers.launch_and_check(take_steps, out_dir, model_dir, RIGHT, "cpu", world_size=1)
    finally:
        trainers.close()
    return {case: torch.load(out_dir / case.file("cpu", 0)) for case in RIGHT}


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    gpu_trainers: TrainerServers,
    model_dir: Path,
) -> dict[Case, Any]:
    """The steps of each rank, of the cases that pytest was asked for; one group of trainers a number of ranks."""
    out_dir = tmp_path_factory.mktemp("gpu")
    asked = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
    by_size = defaultdict(list)
    for case in CASES:
        if case in asked:
            by_size[LAYOUTS[case.layout][0]].append(case)
    for size, cases in by_size.items():
        gpu_trainers.launch_and_check(take_steps, out_dir, model_dir, cases, "cuda", world_size=size)
    return {
        case: [torch.load(out_dir / case.file("cuda", rank)) for rank in range(size)]
        for size, cases in by_size.items()
        for case in cases
    }


def distance(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).norm() / right.norm())


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:3])))
def test_gradients_are_those_of_one_process_on_the_cpu(case: Case, found: Any, right: Any) -> None:
    expected, tolerance = right[Case("dp1", case.precision, case.is_shared)], TOLERANCE[case.precision]
    for step, of_step in enumerate(expected["steps"]):
        gradients = of_step["gradients"]
        met = [rank["steps"][step] for rank in found[case]]
        assert {name for rank in met for name in rank["gradients"]} == gradients.keys()
        worst = max(
            (distance(gradient, gradients[name]), name) for rank in met for name, gradient in rank["gradients"].items()
        )
        assert worst[0] < tolerance, (step, worst)
        for rank in met:
            assert rank["norm"] == pytest.approx(of_step["norm"], rel=tolerance)
        reported = [rank["sums"] for rank in met if rank["sums"]]  # by the last stage
        assert reported
        for sums in reported:
            assert sums == pytest.approx(of_step["sums"], rel=tolerance, abs=tolerance)


def test_each_stage_exports_the_same_weights_as_the_cpu(found: Any, right: Any) -> None:
    for case, ranks in found.items():
        expected = right[Case("dp1", case.precision, case.is_shared)]["weights"]
        exported = {name: weight for rank in ranks for name, weight in rank["weights"].items()}
        assert exported.keys() == expected.keys(), case
        worst = max((distance(weight, expected[name]), name) for name, weight in exported.items())
        assert worst[0] < TOLERANCE["bf16"], (case, worst)
