"""Test the deadline that all waits of one transfer share."""

import threading
import time

import pytest

from coati_rl.errors import TransferError, TransferTimeoutError
from coati_rl.transport.deadline import Deadline


def test_it_names_what_was_waited_for_and_how_long():
    deadline = Deadline(0.01)
    deadline.check("early")
    time.sleep(0.02)
    with pytest.raises(TransferTimeoutError, match=r"rank 1, bucket 2: not done within 0\.01 s"):
        deadline.check("rank 1, bucket 2")
    assert deadline.remaining_s() == 0.0


def test_a_call_returns_its_result_or_raises_its_own_error():
    deadline = Deadline(10.0)
    assert deadline.run(lambda: 3, what="calling") == 3
    with pytest.raises(ZeroDivisionError):
        deadline.run(lambda: 1 / 0, what="calling")


def test_a_timeout_error_of_the_call_is_not_taken_for_the_deadline():
    def fail() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        Deadline(10.0).run(fail, what="calling")


def test_a_call_that_hangs_is_given_up_at_the_deadline():
    release = threading.Event()
    begin = time.monotonic()
    with pytest.raises(TransferTimeoutError, match="hanging"):
        Deadline(0.2).run(release.wait, what="hanging")
    assert 0.2 <= time.monotonic() - begin < 5.0
    release.set()


def test_another_thread_can_cancel_it():
    cancelled = threading.Event()
    threading.Timer(0.05, cancelled.set).start()
    with pytest.raises(TransferError, match="waiting: cancelled"):
        Deadline(10.0, cancelled=cancelled).run(threading.Event().wait, what="waiting")


def test_what_is_watched_can_end_it_with_its_reason():
    reasons = iter([None, None, "rank 3 died"])
    begin = time.monotonic()
    with pytest.raises(TransferError, match="waiting: rank 3 died"):
        Deadline(10.0).watching(lambda: next(reasons)).run(threading.Event().wait, what="waiting")
    assert time.monotonic() - begin < 5.0


def test_watching_wins_no_time():
    deadline = Deadline(0.01)
    time.sleep(0.02)
    assert deadline.watching(lambda: None).remaining_s() == 0.0
