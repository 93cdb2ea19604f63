"""Test a block on a terminal of its own: what is printed above it, new sizes, lost terminals, killed processes."""

import logging
import os
import signal
import subprocess
import sys
import termios
import threading
import time

import pytest
from rich.console import Console
from rich.text import Text

from coati_rl.observability import live_block
from coati_rl.observability.live_block import LiveBlock
from coati_rl.observability.progress import ProgressDisplay
from coati_rl.observability.terminal_streams import can_draw
from tests.unit.observability.screen import Terminal, until

STEP = {"event": "step", "step": 2, "reward_mean": 0.5, "answer_accuracy": 0.25, "loss": 0.1, "step_s": 1.0}
BLOCK = ["step 2/4 ━", "reward 0.500", "", ""]  # the beginnings of the lines, and the cursor's


@pytest.fixture
def terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    yield terminal
    for close in (terminal.stream.close, lambda: os.close(terminal.master)):
        try:
            close()
        except OSError:
            assert terminal.screen is None, "closed by the test"


@pytest.fixture
def display(terminal):
    return ProgressDisplay(4, Console(file=terminal.stream, color_system=None))


@pytest.fixture
def as_output(terminal, monkeypatch):
    """Make the terminal standard output and error; called by the test itself, as pytest sets them before."""

    def set_streams():
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, terminal.stream)

    return set_streams


def has_block(lines):
    return len(lines) >= len(BLOCK) and all(map(str.startswith, lines[-len(BLOCK) :], BLOCK))


def test_prints_and_logs_are_whole_lines_above_the_block(terminal, display, as_output, monkeypatch):
    as_output()
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)  # as a run's own
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    monkeypatch.setattr(logging.getLogger("another.library"), "handlers", [logging.lastResort])
    with display:
        display.show(STEP)
        until(lambda: has_block(terminal.read()))
        sys.stdout.write("printed ")
        sys.stdout.write("in parts\nand lines\n")
        sys.stderr.write("an error\n")
        logging.getLogger("a.library").warning("a log")
        logging.getLogger("another.library").warning("another log")
        display.print_line("x" * 200)
        until(lambda: terminal.shows("xx") and has_block(terminal.read()))
    shown = terminal.read()
    assert handler.stream is terminal.stream is sys.stdout
    assert shown[:4] == ["printed in parts", "and lines", "an error", "a log"]
    assert shown[4:6] == ["another log", "another log"], "of its own handler and of the root's"
    assert [line for line in shown if "x" in line and not line.strip("x")] == ["x" * 80, "x" * 80, "x" * 40]
    assert not any("━" in line for line in shown) and shown[-1] == "" and terminal.screen.column == 0


def test_a_part_of_a_line_is_printed_at_the_end(terminal, display, as_output):
    as_output()
    with display:
        sys.stdout.write("no end of line")
    assert terminal.read()[0] == "no end of line"


def test_a_handler_of_logs_that_is_made_meanwhile_goes_on_afterwards(terminal, display, as_output):
    as_output()
    with display:
        handler = logging.StreamHandler()
    handler.handle(logging.makeLogRecord({"msg": "a log"}))
    assert terminal.read()[0] == "a log"


def test_a_block_follows_the_width_of_its_terminal_and_leaves_nothing_behind(terminal, display):
    terminal.resize(120)
    with display:
        display.print_line("above")
        display.show({**STEP, "trainer_idle_fraction": 0.5, "staleness_mean": 1.0, "logprob_gap_mean": 1e-7})
        until(lambda: terminal.shows("gap 1.0e-07"))
        assert len(terminal.read()) == 5, "above, the bar, one line of figures, the wait, the cursor"
        terminal.resize(40)
        until(lambda: has_block_of(terminal.read(), 40))
        narrow = terminal.read()
        assert [line.split()[0] for line in narrow if line] == ["above", "step", "reward", "loss", "idle:", "gap"]
        terminal.resize(120)
        until(lambda: has_block_of(terminal.read(), 120))
        assert len(terminal.read()) == 5


def has_block_of(lines, width):
    """Whether the time left ends where a terminal of this width has it end."""
    return any(line.startswith("step 2/4") and len(line) == min(width - 1, 100) for line in lines)


def test_a_block_higher_than_its_terminal_is_cut(terminal):
    terminal.resize(80, 4)
    block = LiveBlock(Console(file=terminal.stream), lambda width: Text("\n".join("abcdefgh")))
    for _ in range(3):
        block.print_above("line")
        block.draw()
    assert terminal.read() == ["line", "line", "line", "a", "b", "c", ""]


def test_there_are_at_most_four_frames_a_second_and_none_without_a_change(terminal):
    number = 0

    def render(width):
        return Text(str(number))

    block = LiveBlock(Console(file=terminal.stream), render)
    block.start()
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        number += 1
        block.refresh()
        time.sleep(0.01)
    terminal.read()
    block.stop()
    assert 1 <= terminal.bytes.count(b"\x1b[J") <= 5
    quiet = LiveBlock(Console(file=terminal.stream), render)
    quiet.draw()
    terminal.read()
    frames = terminal.bytes
    quiet.draw()
    terminal.read()
    assert terminal.bytes == frames


def test_a_stopped_terminal_stops_nothing_else(terminal, display, monkeypatch):
    monkeypatch.setattr(live_block, "_END_S", 0.1)
    termios.tcflow(terminal.stream.fileno(), termios.TCOOFF)  # as Ctrl-S does
    try:
        begin = time.monotonic()
        with display:
            for number in range(1000):
                display.print_line(f"line {number}")
        assert time.monotonic() - begin < 20.0  # else it waits for the terminal
    finally:
        termios.tcflow(terminal.stream.fileno(), termios.TCOON)
    until(lambda: terminal.shows("line 999"))


def test_a_closed_terminal_stops_nothing(terminal, display):
    with display:
        display.show(STEP)
        until(lambda: has_block(terminal.read()))
        os.close(terminal.master)
        terminal.screen = None
        begin = time.monotonic()
        display.print_line("nobody reads this")
        time.sleep(0.3)
        display.show(STEP)
    assert time.monotonic() - begin < 20.0
    assert "terminal" not in {thread.name for thread in threading.enumerate()}, "the thread that draws has ended"


def test_a_block_that_cannot_be_rendered_stops_no_line(terminal, caplog):
    def render(width):
        raise ZeroDivisionError("a fault of ours")

    block = LiveBlock(Console(file=terminal.stream), render)
    for number in (1, 2):
        block.print_above(f"line {number}")
        block.draw()
    assert terminal.read() == ["line 1", "line 2", ""]
    assert [record.getMessage() for record in caplog.records] == [
        "the terminal's block cannot be drawn; lines are printed as they come"
    ]


def test_after_a_stop_the_block_is_drawn_below_what_the_shell_has_written(terminal, monkeypatch):
    monkeypatch.setattr(live_block, "_STOPPED_S", 0.3)
    monkeypatch.setattr(live_block, "_TIME_S", 0.5)  # as long as a stop
    block = LiveBlock(Console(file=terminal.stream), lambda width: Text(f"block {time.monotonic()}"))
    block.draw()
    terminal.stream.write("^Z\n[1]+  Stopped\n$ fg\n")
    terminal.stream.flush()
    block.start()
    until(lambda: sum(line.startswith("block") for line in terminal.read()) == 2)
    block.stop()
    assert terminal.read()[1:4] == ["^Z", "[1]+  Stopped", "$ fg"]


def test_a_progress_bar_of_a_library_is_a_line_of_its_last_state(terminal, display, as_output):
    as_output()
    with display:
        for share in (0, 50, 100):
            sys.stderr.write(f"\rwriting: {share}%")
        sys.stderr.write("\r\n")
    assert terminal.read()[0] == "writing: 100%"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_kills_a_process_leaves_the_cursor_below_the_block(terminal, number):
    program = (
        "import time\nfrom coati_rl.observability.progress import ProgressDisplay\n"
        f"with ProgressDisplay(4) as display:\n    display.show({STEP!r})\n    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=terminal.stream, stderr=terminal.stream)
    try:
        until(lambda: has_block(terminal.read()), 30.0)
    finally:
        process.send_signal(number)
        process.wait(10.0)
    assert has_block(terminal.read()) and terminal.screen.column == 0
    assert terminal.screen.row == len(terminal.screen.lines) - 1, "the shell's prompt comes below"


@pytest.mark.parametrize(
    ("variables", "is_drawn"),
    [
        ({}, True),
        ({"NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
        ({"TERM": ""}, False),
        ({"NO_COLOR": ""}, True),
    ],
)
def test_who_wants_plain_text_has_no_block(terminal, monkeypatch, variables, is_drawn):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert can_draw(terminal.stream) is is_drawn


def test_a_file_or_a_pipe_is_no_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as CI sets it
    with (tmp_path / "out").open("w") as file:
        assert not can_draw(file)
    assert not can_draw(file), "it is closed"
