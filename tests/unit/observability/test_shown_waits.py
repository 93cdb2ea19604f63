"""Test what a person sees of a run that waits: one line for each reason, and how long it has held."""

import io

import pytest
from rich.console import Console

from coati_rl.observability.progress import ProgressDisplay

STEP = {"event": "step", "step": 2, "reward_mean": 0.5, "answer_accuracy": 0.25, "loss": 0.1}


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


WAIT = "waiting for rollouts: {} of 8 groups of step 5 are finished, {} prompts are being sampled by 2 producers"
SYNC = "waiting for the transfer of version 4 to producers 0, 1"


def told(text, seconds):
    """Return a line with the time for which its reason has held."""
    return f"{text} ({seconds} s)"


@pytest.fixture
def watched():
    """(is a terminal) -> a function that plays statuses, one each quarter of a second, and returns what is shown."""

    def make(*, terminal):
        text, clock = io.StringIO(), Clock()
        console = Console(file=text, force_terminal=terminal, width=160, color_system=None)
        display = ProgressDisplay(4, console, now=clock)

        def play(*statuses, seconds=0.25):
            for status in statuses:
                clock.now += seconds
                display.show(status) if isinstance(status, dict) else display.show_wait(status)
            if terminal:
                console.print(display._content.render(160))
            shown = text.getvalue()
            text.seek(0), text.truncate()
            return shown.splitlines()

        return play

    return make


def test_what_a_run_waits_for_is_a_line_within_five_seconds_and_only_once(watched, caplog):
    play = watched(terminal=False)
    with caplog.at_level("INFO", logger="coati_rl.observability.progress"):
        assert play(*[WAIT.format(0, 8)] * 10) == [], "most waits are short"
        assert play(*[WAIT.format(0, 8)] * 10) == [told(WAIT.format(0, 8), 3)]
        assert play(*[WAIT.format(n, 8 - n) for n in (1, 2, 3)] * 20, *[WAIT.format(4, 4)] * 40) == []
        assert play(WAIT.format(5, 3), seconds=6.0) == [told(WAIT.format(5, 3), 36)], "twice a minute, with new numbers"
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [told(WAIT.format(0, 8), 3), told(WAIT.format(5, 3), 36)]


def test_another_reason_is_another_line_if_it_lasts(watched):
    play = watched(terminal=False)
    assert play(*[SYNC] * 20) == [told(SYNC, 3)]
    assert play(*[WAIT.format(0, 8), SYNC] * 10) == [], "each is gone at once"
    assert play(*[WAIT.format(0, 8)] * 20) == [told(WAIT.format(0, 8), 1)]
    assert play(*["waiting for the transfer of version 6 to producer 1"] * 20) == [], "as before but for numbers"


def test_while_a_run_moves_there_is_no_line_of_what_it_waits_for(watched):
    play = watched(terminal=False)
    for _ in range(10):
        lines = play(*[WAIT.format(0, 8)] * 8, STEP)
        assert len(lines) == 1 and lines[0].startswith("step 2/4"), "each 2 s"
    assert play(*[""] * 40) == []


def test_at_a_terminal_the_last_line_follows_what_is_waited_for(watched):
    play = watched(terminal=True)
    assert not play(*[WAIT.format(0, 8)] * 10)[-1].startswith("waiting")
    assert play(*[WAIT.format(0, 8)] * 3)[-1] == told(WAIT.format(0, 8), 3)
    assert play(WAIT.format(1, 7))[-1] == told(WAIT.format(1, 7), 3)
    assert "waiting" not in " ".join(play(STEP))
    assert play(*[SYNC] * 20)[-1] == told(SYNC, 5)


def test_the_time_of_a_wait_begins_with_the_last_step(watched):
    play = watched(terminal=True)
    training = "step {} is being trained"
    for step in range(1, 5):
        play(*[training.format(step)] * 8, STEP)
    assert play(*[training.format(5)] * 20)[-1] == told(training.format(5), 5)
