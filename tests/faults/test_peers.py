"""Test processes that die, stop or cannot connect during a weight sync: each error names the process, in time."""

import socket

import pytest

from coati_rl.runtime.remote import STAGING_GRACE_S

pytestmark = pytest.mark.full
SYNC_TIMEOUT_S = 10


def assert_trained(run, *, steps):
    """Exit 0 with every step and, for every version, weights that are the trainer's."""
    assert run.wait() == 0, run.text()
    assert [record["step"] for record in run.records()] == list(range(1, steps + 1))
    syncs = run.syncs()
    assert {sync["step"] for sync in syncs} == set(range(steps + 1))
    assert all(sync["probe_gap_max"] < 1e-4 for sync in syncs)
    assert run.left_over() == []


def test_producers_that_die_or_stop_in_mid_transfer_are_replaced_and_the_sync_is_repeated(make_tiny, start_run, flags):
    steps = 3
    job = flags(make_tiny(tied=True), inferencers=2, prompts=2)
    run = start_run(
        *[*job, "-b", "transformers", "--max-steps", steps, "--sync-timeout-s", SYNC_TIMEOUT_S],
        stagings={"0@1": "SIGKILL", "1@2": "SIGSTOP"},
    )

    assert_trained(run, steps=steps)

    lost = [line for line in run.text().splitlines() if line.startswith("producer ") and " lost: " in line]
    assert len(lost) == 2, run.text()
    assert "producer 0 lost: weight sync to version 1 failed: producer-0 died" in lost[0]
    at = [record["time_s"] for record in run.records()]
    assert at[2] - at[1] < SYNC_TIMEOUT_S + STAGING_GRACE_S + 60, "the stopped one holds nobody up for longer"
    limit = f"did not answer within {SYNC_TIMEOUT_S + STAGING_GRACE_S:g} s"
    assert f"producer 1 lost: weight sync to version 2 failed: producer-1 {limit}" in lost[1]
    log = run.log("trainer-0")
    bucket = "sending bucket 1 of 1 of version {} (first tensor: 'model.embed_tokens.weight'): {}"
    digest = "sending the digest of version {}: {}"  # gloo's thread may still take the bucket while the process stops
    assert bucket.format(1, "rank 1 died") in log
    not_done = f"not done within {SYNC_TIMEOUT_S} s"
    assert bucket.format(2, not_done) in log or digest.format(2, not_done) in log
    assert set(run.syncs()[-1]["producers"]) <= {2, 3}, "those that came later"


def test_a_taken_port_is_named_before_anything_is_trained(make_tiny, start_run, flags):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = start_run(*flags(make_tiny(tied=True)), "-b", "fake", "--max-steps", 2, "--master_port", port)

        assert run.wait() == 2, run.text()

    assert (
        f"--master_port {port}: cannot listen there: Address already in use; use --master_port 0"
        in run.text().splitlines()[-1]
    )
    assert not run.run_dir.exists()
    assert run.left_over() == []
