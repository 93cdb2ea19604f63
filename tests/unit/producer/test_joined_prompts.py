"""Test the prompts of a producer that has joined over HTTPS when connections break: a coordinator, no network."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event, Timer

import pytest

from coati_rl.batching.packed_group import PackedGroup
from coati_rl.coordinator.coordinator import Coordinator
from coati_rl.errors import CoordinatorReplacedError
from producer.joining.client import ConnectionLostError, HttpCoordinator, JoinConnection
from producer.joining.frames import Frame
from producer.joining.joined_producer import JoinedProducer
from tests.unit.coordinator.coordinator_calls import lease_all
from tests.unit.groups import make_coordinator, make_group, make_prompts, make_settings

__all__ = ["make_coordinator", "make_group", "make_prompts", "make_settings"]  # fixtures

WAITS = {"max_prompts": 100, "timeout_s": 5.0, "is_drained": True}


class Connection(JoinConnection):
    """Ask the run's side directly; the next request of the call `loses` breaks, and arrives with `arrive`."""

    def __init__(self, producer):
        self._producer, self._patience_s = producer, 10.0
        self.loses, self.late = "", []

    def ask_once(self, call, frame=None, **fields):
        given = frame or Frame(fields={})
        body = Frame(fields={**given.fields, **fields}, payload=given.payload).to_bytes()
        if self.loses == call:
            self.loses = ""
            self.late.append((call, body))
            raise ConnectionLostError("the connection broke")
        return self._answer(call, body)

    def arrive(self):
        """What was lost on its way arrives now."""
        return self._answer(*self.late.pop())

    def _answer(self, call, body):
        return Frame.from_bytes(self._producer.answer(call, Frame.from_bytes(body)).to_bytes())


@pytest.fixture
def joined(make_coordinator):
    """A coordinator of which producer 0 has all prompts that may be leased, producer 1, and its connection."""
    coordinator = make_coordinator(num_prompts=8)
    coordinator.put = partial(Coordinator.put, coordinator)  # groups come packed
    coordinator.add_producer(0, version=0)
    coordinator.add_producer(1, version=0, is_extra=True)
    lease_all(coordinator)
    producer = JoinedProducer(lost_after_s=30.0, commits_in_flight=False)
    producer.number = 1
    with ThreadPoolExecutor(1) as pool:
        pool.submit(producer.run, coordinator)
        connection = Connection(producer)
        assert connection.ask("number").fields["number"] == 1
        yield coordinator, connection, HttpCoordinator(connection)
        connection.ask("done")


def lease(client, **changes):
    return [each.prompt.uid for each in client.lease(1, **{**WAITS, "timeout_s": 0.0, **changes}).leases]


@pytest.fixture
def waiting(joined, monkeypatch):
    """The answer, which nobody reads, to a lease whose connection has broken and which waits in the coordinator."""
    coordinator, connection, _ = joined
    begun, ask = Event(), type(coordinator).lease

    def noted(self, *args, **options):
        begun.set()
        return ask(self, *args, **options)

    monkeypatch.setattr(type(coordinator), "lease", noted)
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(connection.ask_once, "lease", **WAITS, rejoins=0)
        assert begun.wait(10.0)
        monkeypatch.undo()
        yield lost


def test_prompts_that_a_lost_request_takes_are_given_back(joined, waiting):
    coordinator, _, client = joined
    with ThreadPoolExecutor(1) as pool:
        rejoined = pool.submit(client.rejoin, 1, [])
        time.sleep(0.1)
        coordinator.remove_producer(0, "lost")  # its prompts are free, and the lost request takes them
        lost = [each["prompt"]["uid"] for each in waiting.result(10.0).fields["leases"]]
        assert rejoined.result(10.0) == ()
    assert len(lost) > 0 and lease(client) == lost


def test_groups_and_failures_do_not_wait_for_a_request_for_prompts(joined, waiting):
    coordinator, connection, client = joined
    client.fail(1, 99, "none")
    assert client.put(1, []) == 0
    connection.ask("beat")
    assert not waiting.done()
    coordinator.remove_producer(0, "lost")


def test_a_call_that_arrives_after_the_producer_has_said_what_it_holds_is_refused(joined, make_group):
    coordinator, connection, client = joined
    coordinator.remove_producer(0, "lost")
    first, *others = client.lease(1, **WAITS).leases
    group = PackedGroup.pack(make_group(first, producer=1))
    for call, make in (("lease", lambda: lease(client)), ("put", lambda: client.put(1, [group]))):
        connection.loses = call
        with pytest.raises(CoordinatorReplacedError, match=f"an answer to {call} is lost"):
            make()
        assert client.rejoin(1, [first.lease_id]) == ()
        with pytest.raises(CoordinatorReplacedError, match="has said since"):
            connection.arrive()
    assert lease(client) == [each.prompt.uid for each in others], "which it gave back"
    assert client.put(1, [group]) == 1


def test_a_try_to_rejoin_that_arrives_late_takes_no_prompt_away(joined, make_group):
    coordinator, connection, client = joined
    coordinator.remove_producer(0, "lost")
    connection.loses = "rejoin"
    assert client.rejoin(1, []) == ()
    held = client.lease(1, **WAITS).leases
    with pytest.raises(CoordinatorReplacedError, match="has said since"):
        connection.arrive()
    assert client.put(1, [PackedGroup.pack(make_group(each, producer=1)) for each in held]) == len(held) > 0


def test_a_rejoin_is_made_again_while_an_earlier_request_lasts(joined, waiting, monkeypatch):
    coordinator, connection, client = joined
    monkeypatch.setattr(connection._producer._prompt_calls, "_wait_s", 0.01)
    Timer(0.2, coordinator.remove_producer, [0, "lost"]).start()
    assert client.rejoin(1, []) == ()
    assert waiting.done() and client._num_rejoins > 1
