"""Test that fields of what a run records, and for how long, reach its files.

The part of a test's name before two underscores is the field (see test_flags.py). Files have one step here, not 100.
"""

import pytest

from coati_rl.checkpoint.ledger_files import LEDGER, read_ledger
from coati_rl.config.cli import build_config
from coati_rl.errors import ConfigError


@pytest.fixture(autouse=True)
def one_step_a_file(monkeypatch):
    monkeypatch.setattr("coati_rl.observability.step_files.STEPS_PER_FILE", 1)


def steps_of(directory):
    return [int(path.stem.rpartition("-")[2]) for path in sorted(directory.glob("*.jsonl"))]


def test_keep_rollouts__deletes_files_of_earlier_steps(run_in_threads):
    trace = run_in_threads({"keep_rollouts": 2})
    assert (steps_of(trace.paths.run_dir / "rollouts"), steps_of(trace.paths.run_dir / "gradients")) == (
        [3, 4],
        [1, 2, 3, 4],
    )


@pytest.mark.full
def test_keep_weights__keeps_the_last_copies_of_every_nth_step_without_the_state_of_the_optimizer(run_in_threads):
    kept = run_in_threads({"keep_weights": "every=1,last=2"}).paths.run_dir / "kept_weights"
    assert sorted(path.name for path in kept.iterdir()) == ["step-3", "step-4"]
    assert not [*kept.glob("*/optimizer*")]
    every_second = run_in_threads({"keep_weights": "every=2"}).paths.run_dir / "kept_weights"
    assert sorted(path.name for path in every_second.iterdir()) == ["step-2", "step-4"]


@pytest.mark.parametrize("text", ["2", "every=0", "every=1,last=0", "last=2"])
def test_keep_weights__refuses_what_it_cannot_read(text):
    with pytest.raises(ConfigError, match="--keep-weights"):
        build_config({"model": "m", "keep_weights": text})


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kept", "expected"), [(0, []), (3, [2, 3, 4])])
def test_keep_gradients__deletes_files_of_earlier_steps_and_0_writes_none(run_in_threads, kept, expected):
    trace = run_in_threads({"keep_gradients": kept})
    assert (steps_of(trace.paths.run_dir / "rollouts"), steps_of(trace.paths.run_dir / "gradients")) == (
        [1, 2, 3, 4],
        expected,
    )


@pytest.mark.parametrize("is_on", [True, False])
def test_ledger__is_there_after_the_last_checkpoint(run_in_threads, is_on):
    trace = run_in_threads({"ledger": is_on, "max_steps": 1})
    kinds = [each.kind for each in read_ledger(trace.paths.run_dir / LEDGER)]
    assert [kind for kind in kinds if kind != "state"] == (["checkpoint", "saved"] if is_on else [])
    assert ("state" in kinds) == is_on


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("limit", "is_reached"), [(4.0, False), (1e-7, True)])
def test_ledger_max_gb__bounds_what_it_has_of_rollouts(run_in_threads, caplog, limit, is_reached):
    run_in_threads({"ledger_max_gb": limit, "max_steps": 2})
    assert any("has reached --ledger-max-gb" in message for message in caplog.messages) == is_reached
