"""Test what a person sees: a live line on a terminal, plain lines elsewhere."""

import io

import pytest
from rich.console import Console

from coati_rl.observability.progress import ProgressDisplay

STEP = {
    "event": "step",
    **{"step": 2, "reward_mean": 0.5, "answer_accuracy": 0.25, "loss": 0.1},
    **{"staleness_mean": 1.0, "logprob_gap_mean": None},
    "num_response_tokens": 100,
    "step_s": 0.5,
}


@pytest.fixture
def display_on():
    def make(*, terminal, num_steps=4):
        text = io.StringIO()
        console = Console(file=text, force_terminal=terminal, width=160, color_system=None)
        return ProgressDisplay(num_steps, console), text

    return make


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (STEP, "step 2/4  reward 0.500  accuracy 0.250  loss +0.1000  200 tok/s  staleness 1.00  gap -"),
        (
            {**STEP, "loss": None},
            "step 2/4  reward 0.500  accuracy 0.250  loss -  200 tok/s  staleness 1.00  gap -",
        ),
        (
            {"event": "evaluation", "step": 4, "task": "math", "accuracy": 0.75},
            "step 4: math accuracy 0.750 (greedy)",
        ),
        (
            {
                "event": "evaluation",
                "step": 4,
                "task": "math",
                "accuracy": 0.75,
                "num_samples": 8,
                "temperature": 0.6,
                "pass@8": 0.9,
            },
            "step 4: math accuracy 0.750, pass@8 0.900 (8 samples at temperature 0.6)",
        ),
        (
            {"event": "checkpoint", "step": 4, "path": "runs/a/checkpoints/step-4"},
            "step 4: checkpoint runs/a/checkpoints/step-4",
        ),
        (
            {"event": "producer_lost", "producer": 1, "cause": "killed [9]", "prompts_reissued": 3},
            "producer 1 lost: killed [9]; 3 prompts reissued",
        ),
        (
            {"event": "sync", "policy_version": 4, "producers": [], "problem": "rank 1 of 2 died"},
            "weight sync to version 4 failed and is repeated: rank 1 of 2 died",
        ),
        ({"event": "gap", "cause": "too far apart"}, "warning: too far apart"),
        ({"event": "rollout_failed", "uid": "train-7.0", "cause": "refused"}, "prompt train-7.0 failed: refused"),
        (
            {"event": "finished", "step": 4, "groups_dropped": 2, "groups_filtered": 0},
            "2 prompts at the end did not fill a step: dropped",
        ),
        (
            {"event": "finished", "step": 4, "groups_dropped": 2, "groups_filtered": 3},
            "2 prompts at the end did not fill a step: dropped (3 more were filtered)",
        ),
    ],
)
def test_without_a_terminal_every_event_is_a_plain_line(display_on, event, line):
    display, text = display_on(terminal=False)
    with display:
        display.show(event)
    assert text.getvalue() == line + "\n"


@pytest.mark.parametrize(
    "event",
    [
        {"event": "sync", "policy_version": 2, "producers": [0], "seconds": 0.1, "digest": "d", "problem": ""},
        {"event": "producer_joined", "producer": 0},
        {"event": "finished", "step": 4, "groups_dropped": 0, "groups_filtered": 0},
    ],
)
def test_what_goes_as_planned_needs_no_line(display_on, event):
    display, text = display_on(terminal=False)
    with display:
        display.show(event)
    assert text.getvalue() == ""


def test_on_a_terminal_steps_move_a_bar_and_other_events_stay_above_it(display_on):
    display, text = display_on(terminal=True)
    with display:
        display.show(STEP)
        display.show({"event": "checkpoint", "step": 2, "path": "there"})
    shown = text.getvalue()
    assert "2/4" in shown and "training" in shown
    assert "reward 0.500  accuracy 0.250" in shown and "200 tok/s  staleness 1.00" in shown
    assert "step 2: checkpoint there" in shown


def test_the_bar_of_a_resumed_run_begins_where_it_goes_on():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=160, color_system=None)
    with ProgressDisplay(4, console, first_step=3):
        pass
    assert "3/4" in text.getvalue()


def test_a_run_of_unknown_length_is_shown_too(display_on):
    display, text = display_on(terminal=True, num_steps=None)
    with display:
        display.show(STEP)
    assert "training" in text.getvalue()


def test_a_long_line_is_not_broken_where_there_is_no_terminal(display_on):
    display, text = display_on(terminal=False)
    display.print_line("x" * 300)
    assert text.getvalue() == "x" * 300 + "\n"


def test_where_nobody_takes_the_lines_a_run_goes_on_without():
    full = open("/dev/full", "w")  # noqa: SIM115 - closing it fails, too
    with ProgressDisplay(2, Console(file=full)) as display:
        display.print_line("run directory runs/GRPO")
        with pytest.raises(OSError, match="No space left on device"):
            full.flush()
    with pytest.raises(OSError, match="No space left on device"):
        full.close()


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


WAIT = "waiting for rollouts: {} of 8 groups of step 5 are finished, {} prompts are being sampled by 2 producers"
SYNC = "waiting for the transfer of version 4 to producers 0, 1"


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
                console.print(display._render())
            shown = text.getvalue()
            text.seek(0), text.truncate()
            return shown.splitlines()

        return play

    return make


def test_what_a_run_waits_for_is_a_line_within_five_seconds_and_only_once(watched, caplog):
    play = watched(terminal=False)
    with caplog.at_level("INFO", logger="coati_rl.observability.progress"):
        assert play(*[WAIT.format(0, 8)] * 10) == [], "most waits are short"
        assert play(*[WAIT.format(0, 8)] * 10) == [WAIT.format(0, 8)]
        assert play(*[WAIT.format(n, 8 - n) for n in (1, 2, 3)] * 40, *[WAIT.format(4, 4)] * 100) == []
        assert play(WAIT.format(5, 3), seconds=6.0) == [WAIT.format(5, 3)], "once a minute, with its new numbers"
    assert [record.getMessage() for record in caplog.records] == [WAIT.format(0, 8), WAIT.format(5, 3)]


def test_another_reason_is_another_line_if_it_lasts(watched):
    play = watched(terminal=False)
    assert play(*[SYNC] * 20) == [SYNC]
    assert play(*[WAIT.format(0, 8), SYNC] * 10) == [], "each is gone at once"
    assert play(*[WAIT.format(0, 8)] * 20) == [WAIT.format(0, 8)]
    assert play(*["waiting for the transfer of version 6 to producer 1"] * 20) == [], "as before but for numbers"


def test_while_a_run_moves_there_is_no_line_of_what_it_waits_for(watched):
    play = watched(terminal=False)
    for _ in range(10):
        lines = play(*[WAIT.format(0, 8)] * 8, STEP)
        assert len(lines) == 1 and lines[0].startswith("step 2/4"), "each 2 s"
    assert play(*[""] * 40) == []


def test_at_a_terminal_the_last_line_follows_what_is_waited_for(watched):
    play = watched(terminal=True)
    assert WAIT.format(0, 8) not in play(*[WAIT.format(0, 8)] * 10)[-1]
    assert play(*[WAIT.format(0, 8)] * 3)[-1] == WAIT.format(0, 8)
    assert play(WAIT.format(1, 7))[-1] == WAIT.format(1, 7)
    assert "waiting" not in play(STEP)[-1]
    assert play(*[SYNC] * 20)[-1] == SYNC
