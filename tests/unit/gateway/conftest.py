"""Producers of agents, which end with the test."""

import sys

import pytest

from tests.unit.gateway.agent_producer import AGENT, Producer


@pytest.fixture
def make(tmp_path):
    producers = []

    def make(code: str, **options) -> Producer:
        script = tmp_path / "agent.py"
        script.write_text(AGENT + code)
        producers.append(Producer(f"{sys.executable} -S {script}", **options))
        return producers[-1]

    yield make
    for producer in producers:
        producer.close()
