"""Test that records are written by a background thread, in order and completely, and that failures are reported."""

import threading
import time

import pytest

from coati_rl.errors import RunError
from coati_rl.observability import background_writer
from coati_rl.observability.background_writer import BackgroundWriter

SOON_S = 20.0


@pytest.fixture
def gate():
    event = threading.Event()
    yield event
    event.set()


def test_jobs_are_done_in_their_order_by_another_thread():
    writer, done = BackgroundWriter(), []
    for number in range(100):
        writer.submit(lambda number=number: done.append((number, threading.current_thread().name)))
    writer.flush(timeout_s=SOON_S)
    assert done == [(number, "writer") for number in range(100)]
    assert writer.is_idle


def test_a_writer_without_jobs_has_no_thread_and_is_flushed_at_once():
    before = {*threading.enumerate()}
    BackgroundWriter().flush(timeout_s=0)
    assert {*threading.enumerate()} <= before


def test_the_thread_of_a_writer_that_is_not_used_ends_and_a_later_job_is_done_all_the_same(monkeypatch):
    monkeypatch.setattr(background_writer, "_IDLE_S", 0.05)
    writer, threads = BackgroundWriter(), []
    for _ in range(2):
        writer.submit(lambda: threads.append(threading.current_thread()))
        writer.flush(timeout_s=SOON_S)
        threads[-1].join(SOON_S)
        assert not threads[-1].is_alive()
    assert threads[0] is not threads[1]


def test_who_submits_does_not_wait_and_who_flushes_does(gate):
    writer, done = BackgroundWriter(), []
    writer.submit(lambda: done.append(gate.wait(SOON_S)))
    assert not writer.is_idle and done == []
    with pytest.raises(RunError, match=r"rollouts and evaluations are not written after 0.05 s; check their disk"):
        writer.flush(timeout_s=0.05)
    gate.set()
    writer.flush(timeout_s=SOON_S)
    assert done == [True]


def test_who_submits_too_fast_waits_for_room_but_not_for_ever(gate):
    writer = BackgroundWriter()
    for _ in range(3):
        writer.submit(lambda: gate.wait(SOON_S))
    writer.wait_for_room(max_unfinished=3, timeout_s=SOON_S)
    begin = time.monotonic()
    writer.wait_for_room(max_unfinished=2, timeout_s=0.05)
    assert 0.05 <= time.monotonic() - begin < SOON_S
    gate.set()
    writer.wait_for_room(max_unfinished=0, timeout_s=SOON_S)
    assert writer.is_idle


def test_the_first_problem_is_told_and_later_jobs_are_not_begun():
    writer, done = BackgroundWriter(), []

    def fail(text):
        raise RunError(text)

    writer.submit(lambda: done.append(1))
    writer.submit(lambda: fail("the disk is full"))
    writer.submit(lambda: fail("again"))
    writer.submit(lambda: done.append(2))
    with pytest.raises(RunError, match="the disk is full"):
        writer.flush(timeout_s=SOON_S)
    assert (writer.problem, done) == ("the disk is full", [1])


def test_a_bug_in_a_job_is_a_problem_too_and_in_the_log(caplog):
    writer = BackgroundWriter()
    writer.submit(lambda: 1 / 0)
    with pytest.raises(RunError, match="a record could not be written: ZeroDivisionError: division by zero"):
        writer.flush(timeout_s=SOON_S)
    assert "ZeroDivisionError" in caplog.text


def test_every_job_is_news():
    heard = threading.Semaphore(0)
    writer = BackgroundWriter(heard.release)
    writer.submit(lambda: None)
    writer.submit(lambda: 1 / 0)
    assert heard.acquire(timeout=SOON_S) and heard.acquire(timeout=SOON_S)
