"""Test what a person sees: a live line on a terminal, plain lines elsewhere."""

import io
import os

import pytest
from rich.console import Console

from coati_rl.observability.progress import ProgressDisplay
from tests.unit.observability.screen import Screen, until

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


def shown_of(text):
    """Return the lines that a terminal shows, which begins a line at a line feed."""
    screen = Screen(160)
    screen.feed(text.getvalue().replace("\n", "\r\n"))
    return [line for line in screen.shown if line]


@pytest.fixture
def display_on():
    def make(*, terminal, num_steps=4, **options):
        text = io.StringIO()
        console = Console(file=text, force_terminal=terminal, width=160, color_system=None)
        return ProgressDisplay(num_steps, console, **options), text

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
        until(lambda: "there" in text.getvalue() and "reward" in text.getvalue())
        checkpoint, bar, figures, *_ = shown_of(text)
    assert checkpoint == "step 2: checkpoint there" and bar.startswith("step 2/4 ━")
    assert figures.startswith("reward 0.500   accuracy 0.250   loss +0.1000   200 tok/s   staleness 1.00   gap -")
    after = shown_of(text)
    assert after[0] == checkpoint and not any("━" in line for line in after), "the block is gone"


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


def test_where_the_pipe_of_the_lines_is_closed_a_run_goes_on_without():
    reading, writing = os.pipe()
    os.close(reading)  # as of `| head -1`
    pipe = io.TextIOWrapper(io.FileIO(writing, "w"), write_through=True)
    with pipe, ProgressDisplay(2, Console(file=pipe)) as display:
        display.print_line("run directory runs/GRPO")
        display.show(STEP)
        with pytest.raises(BrokenPipeError):
            pipe.write("nobody reads this")
    assert display.last_step == 2


def test_a_line_is_shown_as_it_is(display_on):
    display, text = display_on(terminal=False)
    display.print_line("run directory runs/:100:\t[bold]")
    assert text.getvalue() == "run directory runs/:100:\t[bold]\n"


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
    display, text = display_on(terminal=terminal, closing=lambda: ["checkpoint: runs/a/checkpoints/step-2"])
    with caplog.at_level("INFO", logger="coati_rl.observability.progress"), display:
        display.show({**STEP, "step": 1, "reward_mean": 0.25})
        display.show(STEP)
    logged = [record.getMessage() for record in caplog.records]
    assert "reward     0.25   0.5        2   0.5" in logged
    words = " ".join(text.getvalue().split())
    assert "reward 0.25 0.5 2 0.5" in words and "in all; starting 0.0, waiting for work 0.0, training" in words
    assert "checkpoint: runs/a/checkpoints/step-2" in words


def test_a_run_that_failed_before_its_first_step_has_no_figures(display_on):
    display, text = display_on(terminal=False)
    with display:
        display.print_line("run directory runs/GRPO")
    assert text.getvalue() == "run directory runs/GRPO\n"


def test_why_a_loss_is_0_is_a_line_once(display_on):
    display, text = display_on(terminal=False)
    for step in (1, 2):
        equal = {"constant_group_fraction": 1.0, "groups_total": 8, "groups_all_correct": 5, "groups_all_wrong": 3}
        display.show({**STEP, "step": step, "loss": 0.0, "grad_norm": 0.0, **equal})
    told = [line for line in text.getvalue().splitlines() if "equal rewards" in line]
    assert told == [
        "loss 0 at step 1: all 8 groups have equal rewards (5 all right, 3 all wrong): nothing to learn from"
    ]


def test_what_a_model_said_in_a_message_moves_no_cursor(display_on):
    display, text = display_on(terminal=False)
    display.show({"event": "rollout_failed", "uid": "train-7.0", "cause": "\x1b[2Jrefused \u202egnp.exe"})
    assert text.getvalue() == "prompt train-7.0 failed: \\x1b[2Jrefused \\u202egnp.exe\n"


def test_what_an_encoding_lacks_is_an_escape():
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    ProgressDisplay(4, console).print_line("run directory runs/größe")
    assert raw.getvalue() == b"run directory runs/gr\\xf6\\xdfe\n"


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
