"""Test pairwise combinations of signals, processes, phases and steps behind in runs.

Each time the cause is named within its deadline, and each step of the run trains the samples of an undisturbed run,
each once. In lockstep the weights are the same bit for bit; one step ahead, those of the last resume are.

A trainer that is lost ends the run, which is then resumed with the next fault; a coordinator and a producer are lost in
the last part, which continues to the end. The engine is the fake one: its responses depend only on the prompt.
"""

import functools
import itertools
import json
import time

import pytest

from tests.integration.runs.records import lines

HEARTBEAT_S = 10
DEADLINE_S = {"SIGKILL": 60, "SIGSTOP": 90}  # from the signal to the end of the run, on a loaded machine
STEPS = 16

# Reached so often, when there is a checkpoint: 8 prompts are evaluated before step 1, and 4 are sampled for each step,
# those of the next one while the checkpoint is written.
PHASES = {"generation": 22, "staging": 3, "commit": 3, "step": 3, "save": 2, "evaluation": 4}
VICTIMS = ("trainer-0", "trainer-1", "coordinator", "producer")
SIGNALS = ("SIGSTOP", "SIGKILL")

# Every phase meets every victim; the signal and -nb alternate so that each meets each, and all phases and victims.
ROWS = [
    (SIGNALS[(p + v) % 2], victim, phase, (p + v // 2) % 2)
    for (p, phase), (v, victim) in itertools.product(enumerate(PHASES), enumerate(VICTIMS))
]

REWARD = """
def score(response, ground_truth):
    return float(len(response) % 2)
"""


def test_every_pair_of_values_meets():
    values = (SIGNALS, VICTIMS, tuple(PHASES), (0, 1))
    for i, j in itertools.combinations(range(4), 2):
        assert {(row[i], row[j]) for row in ROWS} == set(itertools.product(values[i], values[j]))
    assert len(ROWS) == 24


def fault(row):
    signal, victim, phase, _ = row
    return {"signal": signal, "victim": victim, "phase": phase, "nth": PHASES[phase]}


def chains(n_behind):
    """Rows to be met one after the other: two that end the run, and two in one run that do not."""
    rows = [row for row in ROWS if row[3] == n_behind]
    victims = (("trainer-0", "trainer-1"), ("coordinator",), ("producer",))
    fatal, *survived = ([row for row in rows if row[1] in chosen] for chosen in victims)
    return [(*fatal[2 * i : 2 * i + 2], *(rows[i] for rows in survived)) for i in range(3)]


@pytest.fixture(scope="module")
def job(make_tiny, flags, tmp_path_factory):
    """The flags of all runs."""
    reward = tmp_path_factory.mktemp("reward") / "own_reward.py"
    reward.write_text(REWARD)
    model = make_tiny(tied=True)
    evaluation = ["-ed", json.dumps({"own": str(model / "eval.jsonl")}), "-ei", 2]
    options = ["-b", "fake", "-rt", f"{reward}:score", "-si", 1, "--max-steps", STEPS, "-lr", 1e-4]
    deadlines = ["--heartbeat-timeout-s", HEARTBEAT_S, "--max-failure-rate", 1]
    return [*flags(model, trainers=2), *options, *evaluation, *deadlines]


def trained(run):
    """(step, prompt, sample) of all that were trained."""
    return sorted((row["step"], row["uid"], row["sample"]) for row in run.rollouts() if row["is_trained"])


def weights(run, step):
    return (run.run_dir / "checkpoints" / f"step-{step}" / "model.safetensors").read_bytes()


def assert_ends_by_name(run, row):
    """Within the deadline of its signal."""
    signal, victim, phase, _ = row
    assert run.wait() == 1, run.text()
    seconds = time.time() - float(run.run_dir.with_name(f"run.signalled-{phase}-{victim}").read_text())
    assert seconds < DEADLINE_S[signal], (row, run.text())
    last = run.text().splitlines()[-1]
    how = "died" if signal == "SIGKILL" else "no sign of life"
    assert f"the run failed: {victim}" in last and how in last, (row, last)
    assert run.left_over() == [], row


@pytest.fixture(scope="module")
def undisturbed(job, start_shared_run):
    """Steps behind -> a run without faults."""

    @functools.cache
    def make(n_behind):
        run = start_shared_run(*job, "-nb", n_behind, name=f"undisturbed-{n_behind}")
        assert run.wait() == 0, run.text()
        assert any(record["grad_norm"] for record in run.records()), "else any weights would do"
        return run

    return make


@pytest.mark.full
@pytest.mark.parametrize("chain", [*chains(0), *chains(1)], ids=lambda chain: "-".join(row[2] for row in chain))
def test_what_is_lost_is_named_in_time_and_what_is_trained_in_the_end_is_the_same(chain, undisturbed, start_run, job):
    *fatal, of_coordinator, of_producer = chain
    resume, n_behind = [], of_producer[3]
    for row in fatal:
        run = start_run(*job, "-nb", n_behind, *resume, signals=[fault(row)])
        assert_ends_by_name(run, row)
        resume = ["-cp", run.run_dir]
    run = start_run(*job, "-nb", n_behind, *resume, signals=[fault(of_coordinator), fault(of_producer)])
    assert run.wait() == 0, run.text()

    assert run.text().count("\nproducer 0 lost: ") == 1, run.text()
    assert run.text().count("\nthe coordinator was lost; ") == 1, run.text()
    rows, expected = trained(run), undisturbed(n_behind)
    assert len(rows) == len(set(rows)) == STEPS * 4 * 4, "steps x prompts x samples"
    assert rows == trained(expected)
    # One step ahead, what a lost producer was sampling is sampled again by newer weights: the bits are compared before.
    step = STEPS if n_behind == 0 else lines(run.run_dir / "resumes.jsonl")[-1]["step"]
    assert weights(run, step) == weights(expected, step)
    assert run.left_over() == []
