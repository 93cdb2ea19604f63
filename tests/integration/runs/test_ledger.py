"""Kill every process of a real run with SIGKILL between two checkpoints; what was finished is not sampled again."""

import random
import time

import psutil
import pytest

from coati_rl.checkpoint.ledger_files import LEDGER, read_ledger
from tests.integration.runs.records import assert_complete, assert_weights_moved, lines, read_rollouts
from tests.integration.runs.test_offline import tensors

MEASURED = ("loss", "grad_norm", "learning_rate", "reward_mean", "staleness_mean", "num_response_tokens")


def kill_all(run):
    """SIGKILL the command, its driver, Ray and all actors."""
    family = run.processes()
    for process in [psutil.Process(run.process.pid), *family]:
        try:
            process.kill()
        except psutil.NoSuchProcess:  # it was below one that is dead already
            continue
    run.process.wait(60)
    psutil.wait_procs(family, timeout=60)


@pytest.mark.full
def test_after_sigkill_of_everything_a_run_goes_on_with_all_that_was_finished_and_to_the_same_bits(
    make_tiny, start_run, flags
):
    job = (*flags(make_tiny(tied=True), prompts=4), "-si", 8, "--max-steps", 12)
    killed = start_run(*job, name="killed")
    killed.wait_for_step(9)
    time.sleep(random.Random(0).random())
    kill_all(killed)
    finished = [each.fields for each in read_ledger(killed.run_dir / LEDGER) if each.kind == "finished"]
    of_checkpoint = {each["uid"] for each in finished if all(version <= 8 for version, _, _ in each["versions"])}
    assert len(of_checkpoint) == 4, "those of step 9, which was trained, and had to be durable before"
    sampled = [line for line in read_rollouts(killed) if line["step"] == 9]

    resumed = start_run(*job, "-cp", killed.run_dir, name="killed")
    assert resumed.wait() == 0, resumed.text()
    (noted,) = lines(resumed.run_dir / "resumes.jsonl")
    assert (noted["step"], noted["groups_of_ledger"]) == (8, 4)
    assert [line for line in read_rollouts(resumed) if line["step"] == 9] == sampled
    assert len(sampled) == 16

    whole = start_run(*job)
    records = assert_complete(whole, steps=12)
    assert_weights_moved(records)
    assert read_rollouts(resumed) == read_rollouts(whole)
    found = [[record[key] for key in MEASURED] for record in lines(resumed.run_dir / "metrics.jsonl")]
    assert found == [[record[key] for key in MEASURED] for record in records]
    assert tensors(resumed, 12) == tensors(whole, 12) and tensors(whole, 12)
