"""Test that fields of runs whose engines join and leave reach the driver (see test_flags.py)."""

import pytest

from coati_rl.config.rules import check
from coati_rl.driver import supervisor
from coati_rl.driver.supervisor import Supervisor
from coati_rl.errors import ConfigError
from tests.unit.driver.fake_actor_group import FakeActorGroup, FakeMember


def test_max_producers__starts_engines_where_nodes_have_room_until_there_are_so_many(monkeypatch, config_with):
    config = config_with(master_address="10.0.0.1", num_inferencer=1, max_producers=3)
    monkeypatch.setattr(supervisor, "_LOOK_FOR_ROOM_S", 0.0)

    def producers_of(most):
        actors = FakeActorGroup(*[[]] * 8, done_after=8)
        actors.producers = {0: FakeMember("producer-0")}

        def add_producer_if_room():
            actors.producers[len(actors.producers)] = FakeMember("joined")

        actors.add_producer_if_room = add_producer_if_room
        Supervisor(actors, id, num_producers=config.num_producers, max_producers=most, stall_timeout_s=60.0).run()
        return len(actors.producers)

    assert [producers_of(most) for most in (None, config.max_producers)] == [1, 3]
    assert config.prompts_per_rollout == config_with(num_inferencer=1).prompts_per_rollout


def test_max_producers__leaves_the_place_of_a_lost_or_leaving_engine_to_the_next_node_with_room(monkeypatch):
    actors = FakeActorGroup(*[[]] * 8, done_after=8)
    left = FakeMember("producer-0", ends=lambda: True)
    monkeypatch.setattr(FakeMember, "result", lambda self: self is left)
    actors.producers, dropped = {0: left, 1: FakeMember("producer-1")}, []
    actors.heartbeats.hung = {"producer-1": "silent"}
    actors.add_producer_if_room = lambda: None

    def drop_producer(producer_id, cause, *, leaves=False):
        dropped.append((producer_id, cause, leaves))
        del actors.producers[producer_id]

    actors.drop_producer = drop_producer
    Supervisor(actors, id, num_producers=2, max_producers=4, stall_timeout_s=60.0).run()
    assert dropped == [(0, "its node goes", True), (1, "silent", False)]
    assert actors.producers == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_producers": 1}, "--max-producers 1: fewer than the engines that the run begins with; use -i 1"),
        (
            {"max_producers": 4, "master_address": None},
            "no node can join a Ray that is started here; give --master_add",
        ),
        ({"max_producers": 4, "colocate": True}, "--max-producers 4 with --colocate: its engines are those of -i"),
    ],
)
def test_max_producers__that_cannot_be_is_refused(config_with, changes, message):
    with pytest.raises(ConfigError, match=message):
        check(config_with(**{"num_inferencer": 2, "master_address": "10.0.0.1", **changes}))
