"""Test the waits for results of remote calls, whose futures are real and set by the tests."""

from concurrent.futures import Future
from threading import Timer
from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError, RayTaskError

from coati_rl.runtime import waits
from coati_rl.runtime.waits import as_ready, ready, result


class Reference:
    """What a remote call returns: as many futures as are asked for, all with the same outcome."""

    def __init__(self, outcome=None):
        self._outcome, self._futures = outcome, []

    def future(self):
        self._futures.append(future := Future())
        if self._outcome is not None:
            self.finish(self._outcome)
        return future

    def finish(self, outcome):
        self._outcome = outcome
        for future in self._futures:
            if not future.done():
                (future.set_exception if isinstance(outcome, BaseException) else future.set_result)(outcome)


def test_a_result_comes_back_as_it_is_and_an_error_as_it_was_raised():
    assert result(Reference((3, 4)), timeout_s=1.0) == (3, 4)
    own_timeout = RayTaskError("run", "Traceback ...", TimeoutError("mine")).as_instanceof_cause()
    with pytest.raises(TimeoutError) as caught:
        result(Reference(own_timeout), timeout_s=1.0)
    assert caught.value is own_timeout, "a TimeoutError of the call is not one of the wait"


def test_a_long_wait_counts_in_slices_so_that_a_stop_of_this_process_counts_as_one(monkeypatch):
    slices, told = [], []
    monkeypatch.setattr(
        waits.futures, "wait", lambda futures, timeout_s: slices.append(timeout_s) or SimpleNamespace(done=set())
    )
    with pytest.raises(GetTimeoutError, match="no result within 7 s"):
        result(Reference(), timeout_s=7.0, meanwhile=lambda: told.append(1))
    assert slices == [2.0, 2.0, 2.0, 1.0]
    assert len(told) == 3


def test_those_that_are_there_in_time_are_returned_in_their_order():
    done, late, failed = Reference(1), Reference(), Reference(ValueError("x"))
    assert ready([failed, late, done], timeout_s=0.01) == [failed, done]
    assert ready([], timeout_s=0.01) == []


def test_each_is_yielded_as_it_is_there_and_at_the_end_those_that_are_late():
    first, second, late = Reference(), Reference(), Reference()
    Timer(0.05, second.finish, (2,)).start()
    Timer(0.25, first.finish, (1,)).start()
    assert list(as_ready([first, late, second], timeout_s=1.0)) == [second, first, late]
