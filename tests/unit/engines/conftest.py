"""Provide engines with a `ScriptedCore`, closed after the test."""

from collections.abc import Callable, Iterator

import pytest

from producer.engines.engine_thread import ThreadedEngine
from tests.unit.engines.scripted_core import ScriptedCore


@pytest.fixture
def start() -> Iterator[Callable[[ScriptedCore], ThreadedEngine]]:
    """Starts an engine that serves version 3."""
    engines = []

    def make(core: ScriptedCore) -> ThreadedEngine:
        engines.append(ThreadedEngine(core, policy_version=3))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
