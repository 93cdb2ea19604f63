"""How much disk a dry run says that checkpoints take."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from coati_rl.config import Config
from coati_rl.preflight.checkpoint_disk import checkpoint_lines, num_checkpoints


@pytest.mark.parametrize(
    ("flags", "num_steps", "expected"),
    [
        ({"save_interval": 100}, 200, 2),
        ({"save_interval": 100}, 201, 3),
        ({"save_interval": 100}, None, None),
        ({"save_interval": -1}, None, 1),
        ({"save_interval": 10, "keep_checkpoints": 2}, 200, 3),  # the third is whole before the first is deleted
        ({"save_interval": 10, "keep_checkpoints": 2}, None, 3),
        ({"save_interval": 10, "keep_checkpoints": 2, "keep_best": "eval/m/accuracy"}, 200, 4),
        ({"save_interval": 100, "keep_checkpoints": 5}, 200, 2),
    ],
)
def test_checkpoints_are_those_of_each_interval_and_of_the_end_that_are_kept(flags, num_steps, expected) -> None:
    assert num_checkpoints(Config(model="model", **flags), num_steps) == expected


def test_the_line_has_the_size_of_all_and_of_one_and_what_is_free(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("coati_rl.preflight.checkpoint_disk.free_bytes", lambda path: 5 * 2**30)
    save_file({"weight": torch.zeros(2**20)}, tmp_path / "model.safetensors")  # 12 bytes a parameter in fp32
    config = Config(model=str(tmp_path), save_interval=10)
    plan = SimpleNamespace(precision="fp32", num_steps=20)
    (line,) = checkpoint_lines(config, plan)
    assert line == "disk of checkpoints     about 24.0 MiB, 2 checkpoints of 12.0 MiB (5.0 GiB free)"
    plan.num_steps = None
    (line,) = checkpoint_lines(config, plan)
    assert line == "disk of checkpoints     about 12.0 MiB each (5.0 GiB free)"


def test_weights_that_are_kept_for_a_replay_have_a_line_of_their_own(tmp_path) -> None:
    save_file({"weight": torch.zeros(2**20)}, tmp_path / "model.safetensors")  # 4 bytes a parameter
    config = Config(model=str(tmp_path), keep_weights="every=5,last=3")
    _, line = checkpoint_lines(config, SimpleNamespace(precision="fp32", num_steps=20))
    assert line == "disk of kept weights    about 16.0 MiB at most (--keep-weights every=5,last=3)"


def test_without_the_model_nothing_is_said(tmp_path) -> None:
    plan = SimpleNamespace(precision="fp32", num_steps=20)
    assert list(checkpoint_lines(Config(model=str(tmp_path / "none")), plan)) == []
