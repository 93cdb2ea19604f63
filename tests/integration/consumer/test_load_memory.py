"""Test that the ranks of a machine together hold one model while they load it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench.random_model import save_random_model

from coati_rl.model_files.quiet import no_progress_bars

pytestmark = pytest.mark.full

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench" / "load_memory.py"
SIZES = {"vocab": 8192, "hidden": 768, "layers": 16, "max_positions": 512}
MOST = 1.2  # models in the training dtype


@pytest.mark.parametrize(("stored", "ranks"), [(torch.float32, 2), (torch.bfloat16, 2), (torch.bfloat16, 4)], ids=str)
def test_ranks_together_hold_one_model_at_the_peak_of_loading(tmp_path, stored, ranks):
    with no_progress_bars():
        save_random_model(tmp_path, **SIZES, dtype=stored)
    found = tmp_path / "found.json"
    layouts = ["tp", "fsdp2"]
    flags = ["--model", tmp_path, "--layout", *layouts, "--ranks", ranks, "--precision", "fp32", "--json", found]
    subprocess.run([sys.executable, SCRIPT, *map(str, flags)], check=True, timeout=300)
    loads = json.loads(found.read_text())["loads"]
    assert [load["layout"] for load in loads] == layouts
    for load in loads:
        in_float32 = load["files"] * 4 // stored.itemsize
        assert 0.99 * in_float32 < load["after"] <= load["peak"] <= MOST * in_float32
