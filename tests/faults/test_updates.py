"""Test that wrong weights are not served, a dead engine is replaced, and a dead trainer ends the run."""

import time

import pytest

# Exports of the trainer by number: 0 is version 0; 1, 2 and 3 are version 1; 4, 5 and 6 version 2; 7 and 8 version 3.
SPOILED = {"1": "missing layer", "2": "NaN", "5": "unknown name", "7": "wrong shape", "8": "SIGKILL"}


@pytest.fixture(scope="module")
def run(make_tiny, start_shared_run, flags):
    """A run that has ended: updates are spoiled, producer 0's engine dies, and in the end the trainer."""
    job = [*flags(make_tiny(tied=True)), "-b", "transformers", "--max-steps", 5]
    run = start_shared_run(*job, exports=SPOILED, stagings={"0@2": "engine dies"})
    run.wait_for_step(3)
    begin = time.monotonic()
    run.wait(60)
    assert time.monotonic() - begin < 60
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
    assert [record["step"] for record in run.records()] == [1, 2, 3]
    assert any(record["grad_norm"] > 0 for record in run.records()), "else old weights would pass for new ones"
    syncs = run.syncs()
    assert [(sync["step"], sync["producers"]) for sync in syncs] == [(0, [0]), (1, [0]), (2, [1])]
    assert all(sync["probe_gap_max"] < 1e-4 for sync in syncs)


def test_a_producer_whose_engine_dies_is_replaced(run):
    assert "producer 0 lost: " in run.text() and "the engine died: MemoryError: out of memory" in run.text()
    assert "producer 1 lost: " not in run.text()


def test_a_trainer_that_dies_while_it_sends_ends_the_run_and_nothing_is_left(run):
    assert run.process.returncode == 1, run.text()
    last = run.text().splitlines()[-1]
    assert "trainer-0 died" in last and "logs: " in last
    assert run.left_over() == []


@pytest.mark.full
def test_an_update_that_lacks_a_layer_every_time_ends_a_run_with_vllm_by_that_name(make_tiny, start_run, flags):
    spoiled = dict.fromkeys("123", "missing layer")
    run = start_run(*flags(make_tiny(tied=True)), "--max-steps", 2, exports=spoiled)

    assert run.wait() == 1, run.text()

    last = run.text().splitlines()[-1]
    assert "weight sync to version 1 failed 3 times" in last
    assert "producer 0" in last and "model.layers.1.input_layernorm.weight is missing" in last and "logs: " in last
    assert [sync["step"] for sync in run.syncs()] == [0]
    assert run.left_over() == []
