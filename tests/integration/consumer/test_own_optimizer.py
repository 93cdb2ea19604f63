"""Test optimizers of the user's own in every layout: AdamW as a function, and two groups of momentum, also resumed."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.integration.consumer.conftest import LAYOUTS, save_model
from tests.integration.consumer.own_optimizer_process import OWN, run
from tests.integration.consumer.samples import plain_model
from tests.integration.consumer.trainer_server import TrainerServers

TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}  # of masters, relative to those of one trainer in float32
# Of what two steps have made of them, of which rounding is up to 0.04: without a step it would be 1.
UPDATE_TOLERANCE = 0.2


@pytest.fixture(scope="module")
def directory(trainers: TrainerServers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("own_optimizer")
    save_model(directory / "model", tied=True)
    (directory / "own.py").write_text(OWN)
    (directory / "dp1").mkdir()
    trainers.launch_and_check(run, directory, "dp1", world_size=1)
    return directory


def masters(directory: Path, layout: str, name: str) -> dict[str, Tensor]:
    ranks = [torch.load(path) for path in sorted((directory / layout).glob("rank*.pt"))]
    return {key: tensor for rank in ranks for key, tensor in rank[name].items()}


@pytest.mark.full
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "dp1"])
def test_it_steps_as_in_one_trainer_and_goes_on_bit_for_bit(
    trainers: TrainerServers, directory: Path, layout: str
) -> None:
    (directory / layout).mkdir()
    trainers.launch_and_check(run, directory, layout, world_size=LAYOUTS[layout][0])
    built_in, own, momentum, resumed = (
        masters(directory, layout, name) for name in ("adamw", "own adamw", "own momentum", "resumed")
    )
    assert len(built_in) == len(masters(directory, "dp1", "adamw"))
    assert all(torch.equal(own[name], master) for name, master in built_in.items())
    assert all(torch.equal(resumed[name], master) for name, master in momentum.items())
    tolerance, start = TOLERANCE["bf16" if "zero" in layout else "fp32"], plain_model(directory / "model").state_dict()
    for name, expected in masters(directory, "dp1", "own momentum").items():
        difference = (momentum[name] - expected).norm()
        assert difference <= tolerance * expected.norm(), name
        assert difference <= UPDATE_TOLERANCE * (expected - start[name]).norm(), name
