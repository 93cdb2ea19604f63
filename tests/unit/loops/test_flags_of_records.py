"""Test that fields of what a run records, and for how long, reach its files.

The part of a test's name before two underscores is the field (see test_flags.py). Files have one step here, not 100.
"""

import pytest

from coati_rl.checkpoint.ledger_files import LEDGER, read_ledger


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
    assert kinds == (["checkpoint", "saved"] if is_on else [])


@pytest.mark.parametrize(("limit", "is_reached"), [(4.0, False), (1e-7, True)])
def test_ledger_max_gb__bounds_what_it_has_of_rollouts(run_in_threads, caplog, limit, is_reached):
    run_in_threads({"ledger_max_gb": limit, "max_steps": 2})
    assert any("has reached --ledger-max-gb" in message for message in caplog.messages) == is_reached
