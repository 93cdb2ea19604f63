"""What a person sees: a live line on a terminal, plain lines elsewhere."""

import io

import pytest
from rich.console import Console

from coati_rl.observability.progress import ProgressDisplay

STEP = {
    "event": "step",
    **{"step": 2, "reward_mean": 0.5, "answer_accuracy": 0.25, "loss": 0.1},
    **{"staleness_mean": 1.0, "logprob_gap_mean": None},
    "num_response_tokens": 100,
    "train_s": 0.5,
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
    display.say("x" * 300)
    assert text.getvalue() == "x" * 300 + "\n"


def test_where_nobody_takes_the_lines_a_run_goes_on_without():
    full = open("/dev/full", "w")  # noqa: SIM115 - closing it fails, too
    with ProgressDisplay(2, Console(file=full)) as display:
        display.say("run directory runs/GRPO")
        with pytest.raises(OSError, match="No space left on device"):
            full.flush()
    with pytest.raises(OSError, match="No space left on device"):
        full.close()
