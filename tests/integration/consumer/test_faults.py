"""A trainer never waits for another for longer than its timeout, and says whom it misses."""

import json
from pathlib import Path

import pytest

from tests.integration.consumer.conftest import launch
from tests.integration.consumer.fault_process import TIMEOUT_S


@pytest.mark.parametrize(("fault", "at_most_s"), [("die", TIMEOUT_S - 1), ("hang", TIMEOUT_S + 3)])
def test_a_peer_that_is_gone_is_an_engine_error_within_the_timeout(
    models: dict[bool, Path], tmp_path: Path, fault: str, at_most_s: float
) -> None:
    out_file = tmp_path / "heard.json"
    first, second = launch("fault_process.py", out_file, models[True], fault, world_size=2)
    assert (first.returncode, second.returncode) == (1, 9), first.stderr + second.stderr
    heard = json.loads(out_file.read_text())
    assert heard["step"] == 1
    assert "trainer 0 of 2 could not sum gradients over trainers" in heard["message"]
    assert "another trainer ended or hangs" in heard["message"]
    assert heard["seconds"] < at_most_s
