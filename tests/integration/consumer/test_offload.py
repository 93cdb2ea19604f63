"""Test in every layout that memory which is given up between uses changes no bit, alone and with --colocate."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.consumer.conftest import LAYOUTS, UNEVEN, save_model
from tests.integration.consumer.offload_process import compare
from tests.integration.consumer.trainer_server import TrainerServers

FAST = {("zero2_dp2", "bf16")}
KINDS = [
    (layout, precision)
    for layout in (*LAYOUTS, *UNEVEN)
    for precision in ("fp32", "bf16")
    if precision == "bf16" or "zero" not in layout
]
CASES = [pytest.param(*kind, marks=[] if kind in FAST else pytest.mark.full) for kind in KINDS]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of each dtype: what is a map of a file has no memory to give up."""
    directory = tmp_path_factory.mktemp("models")
    save_model(directory / "policy", tied=True)
    save_model(directory / "teacher", "qwen2", tied=False, num_hidden_layers=3, seed=1)
    model = AutoModelForCausalLM.from_pretrained(directory / "teacher", dtype=torch.bfloat16)
    model.save_pretrained(directory / "teacher-bf16")
    return directory


@pytest.mark.parametrize(("layout", "precision"), CASES)
def test_every_bit_is_that_of_models_that_stay_on_the_device(
    request: pytest.FixtureRequest, trainers: TrainerServers, models: Path, tmp_path: Path, layout: str, precision: str
) -> None:
    others = ("offloaded", "turns") if request.config.getoption("--all") else ("turns",)
    world_size = (LAYOUTS | UNEVEN)[layout][0]
    trainers.launch_and_check(compare, models, tmp_path, layout, precision, others, world_size=world_size)
    plain, *checkpoints = (
        {path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*.safetensors")}
        for name in ("plain", *others)
    )
    assert plain and all(each == plain for each in checkpoints), "the checkpoints"
