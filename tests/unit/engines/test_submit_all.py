"""Test requests that are given to an engine together."""

import time

import pytest

from coati_rl.errors import EngineError
from tests.unit.engines.scripted_core import ScriptedCore, request


def test_all_are_there_before_one_of_them_begins(start):
    core, queued = ScriptedCore(), []
    engine = start(core)
    add, step = engine._answers.add_request, core.step

    def add_slowly(request):
        time.sleep(0.05)
        return add(request)

    def noted():
        queued.append(len(core.queue))
        return step()

    engine._answers.add_request, core.step = add_slowly, noted
    futures = engine.submit_all([request("a"), request("b"), request("c")])
    assert [future.result(60.0).request_id for future in futures] == ["a", "b", "c"]
    assert queued[0] == 3


def test_those_before_one_that_is_refused_are_answered(start):
    core = ScriptedCore()
    core.gate.clear()
    engine = start(core)
    with pytest.raises(EngineError, match="id 'a' is running"):
        engine.submit_all([request("a"), request("b"), request("a")])
    core.gate.set()
    assert engine.submit(request("c")).result(60.0).error is None  # the core answers them in turn
    assert engine.num_sequences() == 0
