"""Test that a command that is silent for long says what it does, and one that is quick says nothing."""

import threading

import pytest

from coati_rl.processes.slow_phase import slow_phase


def test_a_phase_is_told_again_and_again_until_it_ends():
    told, enough = [], threading.Event()

    def say(line):
        told.append(line)
        if len(told) == 3:
            enough.set()

    with slow_phase("preparing, 1 of 3: the rows are read", say, every_s=0.001):
        assert enough.wait(60)
    number = len(told)
    assert told[0] == "preparing, 1 of 3: the rows are read (0 s so far)"
    with slow_phase("quick", say):
        pass
    assert len(told) == number, "neither after its end nor before 30 s"


def test_an_error_of_the_phase_ends_it():
    threads = threading.active_count()
    with pytest.raises(OSError, match="gone"), slow_phase("slow", print):
        raise OSError("gone")
    assert threading.active_count() == threads
