"""Test the signals that end a run: one exception, or a record of when the first one came."""

import os
import signal
import subprocess
import time

import pytest

from coati_rl.processes.interrupts import (
    blocked_in_children,
    ending_signals,
    handle_first,
    interrupt,
    recorded_interrupts,
)

ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]


@pytest.fixture(autouse=True)
def handlers():
    """The process's own come back."""
    before = {number: signal.getsignal(number) for number in ENDING}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDING)
def test_the_first_signal_interrupts_and_further_ones_do_not(number):
    handle_first(ending_signals(), interrupt)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
    for again in ENDING:
        os.kill(os.getpid(), again)


def test_what_nohup_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert ending_signals() == {signal.SIGINT, signal.SIGTERM, signal.SIGQUIT}


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_is_noted_and_cuts_nothing_short(number):
    begin = time.monotonic()
    with recorded_interrupts() as interrupted_at:
        assert interrupted_at() is None
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert begin <= interrupted_at() <= time.monotonic()
    os.kill(os.getpid(), number)  # nor its end


def test_without_a_signal_the_handlers_are_as_they_were(handlers):
    with recorded_interrupts():
        pass
    assert {number: signal.getsignal(number) for number in ENDING} == handlers


def test_a_terminal_that_closes_reaches_the_driver_and_not_what_it_starts():
    handle_first(ending_signals(), interrupt)
    with pytest.raises(KeyboardInterrupt), blocked_in_children():
        child = subprocess.Popen(["sleep", "60"])
        for number in (signal.SIGHUP, signal.SIGQUIT):
            child.send_signal(number)
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.2)
        assert child.poll() is None
        child.kill()
        child.wait()
