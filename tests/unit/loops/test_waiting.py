"""Test that a waiting run reports the reason on the terminal, and continues afterwards.

Each wait is kept up until its reason is on the terminal, whose clock goes ten times as fast.
"""

import io
import json
import time

import pytest
from rich.console import Console

from coati_rl.observability.progress import ProgressDisplay
from consumer.backend import Backend
from producer.actor import ProducerActor
from tests.unit.loops.harness import parity_reward

TOLD_WITHIN_S = 30.0  # of a busy machine; by its own clock the display takes 5 s, see test_progress.py
TWO_PRODUCERS = {"num_inferencer": 2, "inference_batch_size": 2, "inference_microbatch_size": 1}


class Terminal(io.StringIO):
    """Collect the lines that are printed without a terminal."""

    def until(self, text):
        """Return when a line has the text."""
        deadline = time.monotonic() + TOLD_WITHIN_S
        while text not in self.getvalue():
            assert time.monotonic() < deadline, self.getvalue()
            time.sleep(0.01)


@pytest.fixture
def terminal():
    return Terminal()


@pytest.fixture
def run(run_in_threads, terminal):
    """Like run_in_threads, for a person at the terminal."""

    def run(changes=None, **options):
        console = Console(file=terminal, force_terminal=False)
        display = ProgressDisplay(4, console, now=lambda: 10 * time.monotonic())
        trace = run_in_threads(changes, display=display, **options)
        assert [record["step"] for record in trace.steps] == [1, 2, 3, 4]
        return trace

    return run


@pytest.fixture
def held_at(monkeypatch):
    """(class, method, number of the call) -> `hold` is called before it."""

    def at(cls, name, number, hold):
        honest, calls = getattr(cls, name), []

        def held(self, *args, **options):
            calls.append(args)
            if len(calls) == number:
                hold()
            return honest(self, *args, **options)

        monkeypatch.setattr(cls, name, held)

    return at


def test_no_prompts(run, terminal):
    scored = []

    def reward(response, ground_truth):
        scored.append(response)
        if len(scored) == 16:  # the last of 8 prompts x 2 samples
            terminal.until(": no prompts are left: all 8 were drawn")
        return parity_reward(response, ground_truth)

    run(TWO_PRODUCERS, score=reward)
    expected = "waiting for rollouts: 1 of 2 groups of step 4 are finished, 1 prompt is being sampled by 1 producer; "
    assert expected in terminal.getvalue()


@pytest.mark.full
def test_no_slots(run, terminal, held_at):
    reason = "producer 0: no free slots: all 4 are taken (0 prompts being sampled, "
    held_at(Backend, "optimizer_step", 1, lambda: terminal.until(reason))
    run()
    assert "step 1 is being trained; " in terminal.getvalue()


@pytest.mark.full
def test_a_transfer(run, terminal, held_at):
    reason = "waiting for the transfer of version 2 to producer 0"
    held_at(ProducerActor, "stage_weights", 2, lambda: terminal.until(reason))
    run()
    assert reason in terminal.getvalue()


@pytest.mark.full
def test_a_commit(run, terminal, held_at):
    reason = "waiting for producer 0 to commit version 2"
    held_at(ProducerActor, "commit_weights", 2, lambda: terminal.until(reason))
    run()
    assert reason in terminal.getvalue()


@pytest.mark.full
def test_a_producer_that_is_replaced(run, terminal, held_at):
    held_at(ProducerActor, "start", 2, lambda: terminal.until("waiting for a replacement of producer 0"))
    run(dies_at_request=3)
    assert "producer 0 lost: " in terminal.getvalue()


@pytest.mark.full
def test_an_evaluation(run, terminal, tmp_path):
    rows = [{"messages": {"role": "user", "content": "eval" + "x" * i}, "gt_answer": "7"} for i in range(3)]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held, reason = [], "waiting for the evaluation at step 0: 2 of 3 prompts are answered"

    def reward(response, ground_truth):
        if ground_truth == "7" and not held:
            held.append(response)
            terminal.until(reason)
        return parity_reward(response, ground_truth)

    run({**TWO_PRODUCERS, "eval_dataset": {"math": str(tmp_path / "eval.jsonl")}, "eval_interval": 4}, score=reward)
    assert reason in terminal.getvalue()
