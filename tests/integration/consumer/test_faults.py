"""A trainer never waits for another for longer than its timeout, and says whom it misses."""

import json
from pathlib import Path

import pytest

from tests.integration.consumer.conftest import LAYOUTS, launch, save_model
from tests.integration.consumer.fault_process import TIMEOUT_S


@pytest.mark.parametrize(("fault", "at_most_s"), [("die", TIMEOUT_S - 1), ("hang", TIMEOUT_S + 3)])
@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "zero2_dp2"])
def test_a_peer_that_is_gone_is_an_engine_error_within_the_timeout(
    tmp_path: Path, layout: str, fault: str, at_most_s: float
) -> None:
    model_dir, out_file = save_model(tmp_path / "model", tied=True), tmp_path / "heard.json"
    results = launch("fault_process.py", out_file, model_dir, layout, fault, world_size=LAYOUTS[layout][0])
    assert [result.returncode for result in results] == [1, 9], "\n".join(result.stderr for result in results)
    heard = json.loads(out_file.read_text())
    assert heard["step"] == 1
    assert "trainer 0 of 2 could not sum gradients over trainers" in heard["message"]
    assert "another trainer ended or hangs" in heard["message"]
    assert heard["seconds"] < at_most_s
