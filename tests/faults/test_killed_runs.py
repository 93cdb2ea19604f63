"""Kill all processes of real runs at random moments, again and again, and the weights stay the undisturbed run's.

COATI_KILLS: how often, 3 unless given. `killed.jsonl` beside the run has a line for each kill.
"""

import json
import os
import random
import time

import pytest

from coati_rl.checkpoint.ledger_files import LEDGER, read_ledger
from tests.faults.test_pairwise import REWARD
from tests.integration.runs.records import lines
from tests.integration.runs.test_ledger import kill_all

KILLS = int(os.environ.get("COATI_KILLS", 3))
LOST_S = 2.0  # of finished generation, at most
LIVES_S = 2.0  # after its first step, at most

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200 + 300 * KILLS)]


@pytest.fixture(scope="module")
def job(make_tiny, flags, tmp_path_factory):
    """A job in lockstep that does not end."""
    reward = tmp_path_factory.mktemp("reward") / "own_reward.py"
    reward.write_text(REWARD)
    options = ["-b", "fake", "-rt", f"{reward}:score", "-nb", 0, "-si", 1, "-e", 10_000, "--max-steps", 100_000]
    return [*flags(make_tiny(tied=True)), *options, "-lr", 1e-4]


def lost(run, began_s, killed_s):
    """The ages in seconds of the groups that this life finished: those that no file has, and those of weights that no
    checkpoint has yet, which a resumption samples again.
    """
    step = max(checkpoints(run))
    finished = [each.fields for each in read_ledger(run.run_dir / LEDGER) if each.kind == "finished"]
    usable = {each["uid"] for each in finished if all(version <= step for version, _, _ in each["versions"])}
    usable |= {row["uid"] for row in run.rollouts() if row["step"] <= step}
    written = usable | {each["uid"] for each in finished} | {row["uid"] for row in run.rollouts()}
    spans = [each for each in run.timeline("producer-0") if (each["ph"], each["name"]) == ("X", "score")]
    ends = {each["args"]["uid"]: each["end_ns"] / 1e9 for each in spans if each["begin_ns"] / 1e9 > began_s}
    ages = [[killed_s - end for uid, end in ends.items() if uid not in kept] for kept in (written, usable)]
    return *ages, len(ends)


def checkpoints(run):
    return {int(path.parent.name[5:]) for path in run.run_dir.glob("checkpoints/step-*/manifest.json")}


def weights(run, step):
    return (run.run_dir / "checkpoints" / f"step-{step}" / "model.safetensors").read_bytes()


def test_runs_that_are_killed_at_any_moment_lose_nothing_and_go_on_to_the_same_bits(start_run, job):
    rng, resume, at = random.Random(0), [], 0
    for kill in range(KILLS):
        began_s = time.time()
        run = start_run(*job, *resume, name="killed")
        run.wait_for_step(at + 3)
        time.sleep(rng.uniform(0, LIVES_S))
        killed_s = time.time()
        kill_all(run)
        unwritten, again, num_finished = lost(run, began_s, killed_s)
        at = len(run.records())
        with (run.run_dir.parent / "killed.jsonl").open("a") as file:
            ages = {"unwritten_s": unwritten, "sampled_again_s": again}
            file.write(json.dumps({"kill": kill, "step": at, "groups_finished": num_finished, **ages}) + "\n")
        assert num_finished > 0
        assert max(again, default=0.0) < LOST_S
        resume = ["-cp", run.run_dir]

    run = start_run(*job, *resume, name="killed")
    run.wait_for_step(at + 2)
    step = max(checkpoints(run))
    run.end()
    rows = [(row["step"], row["uid"], row["sample"]) for row in run.rollouts() if row["is_trained"]]
    assert len(rows) == len({(uid, sample) for _, uid, sample in rows}), "none is trained twice"
    assert [record["step"] for record in run.records()] == [*range(1, len(run.records()) + 1)]
    assert len(lines(run.run_dir / "resumes.jsonl")) == KILLS

    undisturbed = start_run(*job, name="undisturbed")
    undisturbed.wait_for_step(step + 1, timeout_s=1200)
    undisturbed.end()
    assert weights(run, step) == weights(undisturbed, step)
    expected = sorted((row["step"], row["uid"], row["sample"]) for row in undisturbed.rollouts() if row["step"] <= step)
    assert sorted(row for row in rows if row[0] <= step) == expected
