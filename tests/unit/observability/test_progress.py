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
    **{"step_s": 0.5, "rollout_wait_s": 0.2, "train_s": 0.2, "sync_s": 0.1},
}


GRADED = {"event": "evaluation", "step": 4, "task": "math", "accuracy": 0.0}


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


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
            {**GRADED, "reward_mean": 0.3, "reward_max": 0.5, "correct_from": 1.0},
            "step 4: math accuracy 0.000, reward 0.300 (greedy); nothing reaches --correct-from 1: the largest reward "
            "is 0.5",
        ),
        (
            {**GRADED, "accuracy": 0.125, "reward_mean": 0.3, "reward_max": 1.0, "correct_from": 1.0},
            "step 4: math accuracy 0.125, reward 0.300 (greedy)",
        ),
        (
            {**GRADED, "reward_mean": -1.0, "reward_max": -1.0, "correct_from": 1.0},  # all wrong, of 1 and -1
            "step 4: math accuracy 0.000, reward -1.000 (greedy)",
        ),
        (
            {**GRADED, "accuracy": 0.5, "reward_mean": 0.5, "reward_max": 1.0},
            "step 4: math accuracy 0.500 (greedy)",
        ),
        (
            {**GRADED, "accuracy": 0.5, "reward_mean": 1.0, "reward_max": 1.0, "num_failed": 1},  # 1 and 0
            "step 4: math accuracy 0.500 (greedy)",
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
    assert "step 2/4" in shown
    assert "reward 0.500  accuracy 0.250" in shown and "200 tok/s  staleness 1.00" in shown
    assert "step 2: checkpoint there" in shown


def screen(display, console):
    """Return the lines that a terminal shows below the permanent ones."""
    with console.capture() as captured:
        console.print(display._render())
    return captured.get().splitlines()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_step_bar_and_the_time_left_fit_into_a_narrow_terminal(width):
    clock = Clock()
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    display = ProgressDisplay(10, console, now=clock)
    for step in (1, 2, 3):
        clock.now += 600.0  # of steps of ten minutes, too, the time left is known
        display.show({**STEP, "step": step})
    display.show_wait("a reason")
    bar, *numbers = screen(display, console)
    assert len(bar) <= width
    assert bar.startswith("step 3/10 ") and "━━━" in bar and "0:30:00" in bar
    assert bar.rstrip().endswith("left 1:10:00"), "7 steps of 600 s"
    text = " ".join(" ".join(numbers).split())
    assert text == "reward 0.500 accuracy 0.250 loss +0.1000 200 tok/s staleness 1.00 gap -"


def test_the_bar_of_a_resumed_run_begins_where_it_goes_on():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=160, color_system=None)
    with ProgressDisplay(4, console, first_step=3):
        pass
    assert "step 3/4" in text.getvalue()


def test_a_run_of_unknown_length_is_shown_too(display_on):
    display, text = display_on(terminal=True, num_steps=None)
    with display:
        display.show(STEP)
    assert "step 2 " in text.getvalue()


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


def test_every_step_is_in_the_log_and_without_a_terminal_at_most_one_a_second_is_a_line(caplog):
    text, clock = io.StringIO(), Clock()
    display = ProgressDisplay(20, Console(file=text, force_terminal=False), now=clock)
    with caplog.at_level("INFO", logger="coati_rl.observability.progress"):
        for step in range(1, 21):
            clock.now += 0.3
            display.show({**STEP, "step": step})
    assert [line.split()[1] for line in text.getvalue().splitlines()] == [
        "1/20",
        "5/20",
        "9/20",
        "13/20",
        "17/20",
        "20/20",
    ]
    assert [record.getMessage().split()[1] for record in caplog.records] == [f"{step}/20" for step in range(1, 21)]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_ends_with_its_figures_on_the_screen_and_in_the_log(display_on, caplog, terminal):
    display, text = display_on(terminal=terminal)
    with caplog.at_level("INFO", logger="coati_rl.observability.progress"), display:
        display.show({**STEP, "step": 1, "reward_mean": 0.25})
        display.show(STEP)
    logged = [record.getMessage() for record in caplog.records]
    assert "reward     0.25   0.5        2   0.5" in logged
    words = " ".join(text.getvalue().split())
    assert "reward 0.25 0.5 2 0.5" in words and "in all; starting 0.0, waiting for work 0.0, training" in words


def test_a_run_that_failed_before_its_first_step_has_no_figures(display_on):
    display, text = display_on(terminal=False)
    with display:
        display.print_line("run directory runs/GRPO")
    assert text.getvalue() == "run directory runs/GRPO\n"


def test_a_collapse_is_a_line_of_its_own(display_on):
    display, text = display_on(terminal=False)
    display.show({**STEP, "response_tokens_mean": 1.0, "response_tokens_max": 1, "groups_total": 8})
    assert "warning" not in text.getvalue(), "an incomplete record is none of a run with producers"
    display.show(
        {**STEP, "response_tokens_mean": 1.0, "response_tokens_max": 1, "groups_total": 8}
        | {"distinct_response_fraction": 0.01}
    )
    assert (
        "warning: step 2: the policy may have collapsed: all 100 responses of 8 prompts are the same" in text.getvalue()
    )
