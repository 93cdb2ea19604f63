"""Test that wrong weights are not served, lost producers are replaced, and a hanging or dead trainer ends the run."""

import pytest

from tests.ended import has_ended
from tests.faults.conftest import HEARTBEAT_S, PHASE_S, endless_run

pytestmark = pytest.mark.full
# Exports of the trainer by number: 0 is version 0; 1, 2 and 3 are version 1; 4, 5 and 6 version 2; 7 and 8 version 3.
SPOILED = {"1": "missing layer", "2": "NaN", "5": "unknown name", "7": "wrong shape"}


@pytest.fixture(scope="module")
def run(make_tiny, start_shared_run, flags, tmp_path_factory):
    """A run that has ended: updates are spoiled, producer 0's engine dies, 1 is stopped, the trainer's loss hangs."""
    cue, endless = endless_run(tmp_path_factory.mktemp("loss"))
    job = [*flags(make_tiny(tied=True)), "-b", "transformers", *endless]
    run = start_shared_run(*job, exports=SPOILED, stagings={"0@2": "engine dies"})
    run.wait_for_step(4)
    (run.stopped,) = run.processes("ray::FaultyProducer")
    run.stopped.suspend()
    run.wait_for_text("producer 1 lost: no sign of life for", timeout_s=HEARTBEAT_S + 60)
    run.wait_for_step(len(run.records()) + 2)
    cue.write_text("0")
    run.wait(PHASE_S + 60)
    return run


def test_a_spoiled_update_is_refused_by_name(run):
    log = run.log("trainer-0")
    for cause in (
        "version 1 is refused: model.layers.1.input_layernorm.weight is missing",
        "tensor 'model.norm.weight' holds NaN or infinity; nothing was committed",
        "version 2 is refused: model.norm.weight is missing; model.final_norm.weight is unknown",
        "version 3 is refused: model.norm.weight has shape (32,), the model's has (64,)",
    ):
        assert cause in log, log


def test_a_sync_is_repeated_until_what_serves_is_what_the_trainer_holds(run):
    assert [record["step"] for record in run.records()] == [*range(1, len(run.records()) + 1)]
    assert any(record["grad_norm"] > 0 for record in run.records()[:3]), "else old weights would pass for new ones"
    syncs = run.syncs()
    assert [(sync["step"], sync["producers"]) for sync in syncs[:4]] == [(0, [0]), (1, [0]), (2, [1]), (3, [1])]
    assert syncs[-1]["producers"] == [2]
    assert all(sync["probe_gap_max"] < 1e-4 for sync in syncs)


def test_a_producer_whose_engine_dies_is_replaced(run):
    assert "producer 0 lost: " in run.text() and "the engine died: MemoryError: out of memory" in run.text()


def test_a_stopped_producer_is_replaced_and_ended(run):
    assert f"its process {run.stopped.pid} is stopped" in run.text()
    assert "\nwaiting for " in run.text(), "rollouts, or its part of a weight sync"
    assert has_ended(run.stopped)
    assert "producer 2 lost: " not in run.text()


def test_a_loss_that_never_returns_ends_the_run_by_name_and_nothing_is_left(run):
    assert run.process.returncode == 1, run.text()
    step = len(run.records()) + 1
    assert f"step {step} is being trained; " in run.text()
    last = run.text().splitlines()[-1]
    assert f"trainer-0 hangs: 'train (step {step}) > forward_backward' is not done after" in last
    assert "at own_loss.py:8 in policy_loss" in last and "; the run waits for it" in last
    trained = [(row["uid"], row["sample"]) for row in run.rollouts() if row["is_trained"]]
    assert len(trained) == len(set(trained)) > 0
    assert run.left_over() == []


def test_a_trainer_that_dies_while_it_sends_ends_the_run_and_nothing_is_left(make_tiny, start_run, flags):
    run = start_run(*flags(make_tiny(tied=True)), "-b", "transformers", "--max-steps", 2, exports={"1": "SIGKILL"})
    assert run.wait() == 1, run.text()
    last = run.text().splitlines()[-1]
    assert "trainer-0 died" in last and "logs: " in last
    assert run.left_over() == []


def test_an_update_that_lacks_a_layer_every_time_ends_a_run_with_vllm_by_that_name(make_tiny, start_run, flags):
    spoiled = dict.fromkeys("123", "missing layer")
    run = start_run(*flags(make_tiny(tied=True)), "--max-steps", 2, exports=spoiled)

    assert run.wait() == 1, run.text()

    last = run.text().splitlines()[-1]
    assert "weight sync to version 1 failed 3 times" in last
    assert "producer 0" in last and "model.layers.1.input_layernorm.weight is missing" in last and "logs: " in last
    assert [sync["step"] for sync in run.syncs()] == [0]
    assert run.left_over() == []
