"""Test that a trainer never waits for another longer than its timeout, and names the missing one."""

import json
from pathlib import Path

import pytest

from tests.integration.consumer.conftest import LAYOUTS, save_model
from tests.integration.consumer.fault_process import TIMEOUT_S, train_until_a_fault
from tests.integration.consumer.trainer_server import TrainerServers

AT_MOST_S = {"die": TIMEOUT_S - 1, "hang": TIMEOUT_S + 3}
FAULTS = [("dp2", "die"), ("tp2", "die"), ("pp2", "die"), ("zero2_dp2", "die"), ("dp2", "hang")]
FAULTS += [("fsdp2_dp2", "die")]
FAULTS += [pytest.param(layout, "hang", marks=pytest.mark.full) for layout in ("tp2", "pp2", "zero2_dp2", "fsdp2_dp2")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("layout", "fault"), FAULTS)
def test_a_peer_that_is_gone_is_an_engine_error_within_the_timeout(
    trainers: TrainerServers, tmp_path: Path, layout: str, fault: str
) -> None:
    model_dir, out_file = save_model(tmp_path / "model", tied=True), tmp_path / "heard.json"
    results = trainers.launch(train_until_a_fault, out_file, model_dir, layout, fault, world_size=LAYOUTS[layout][0])
    assert [result.exit_code for result in results] == [1, 9], "\n".join(result.output for result in results)
    heard = json.loads(out_file.read_text())
    assert heard["step"] == 1
    # Data-parallel copies meet when their gradients are summed, the other layouts in every forward or backward.
    what = "sum gradients over trainers" if layout == "dp2" else "compute gradients"
    assert f"trainer 0 of 2 could not {what}" in heard["message"]
    assert "another trainer has probably ended or hangs" in heard["message"]
    assert heard["seconds"] < AT_MOST_S[fault]
