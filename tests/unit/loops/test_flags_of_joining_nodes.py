"""Test that fields of runs whose engines join and leave reach the driver (see test_flags.py)."""

import socket
from functools import partial

import pytest

from coati_rl.config.rules import check
from coati_rl.driver import supervisor
from coati_rl.driver.supervisor import Supervisor
from coati_rl.errors import ConfigError
from coati_rl.processes.http_server import listen
from coati_rl.processes.join_address import check_join_secrets, join_port_held, join_url
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

    assert [producers_of(most) for most in (None, config.parallel.max_producers)] == [1, 3]
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
            "--max-producers 4 without --master_address: has no effect; add",
        ),
        ({"max_producers": 4, "colocate": True}, "--max-producers 4 with --colocate: its engines are those of -i"),
    ],
)
def test_max_producers__that_cannot_be_is_refused(config_with, changes, message):
    with pytest.raises(ConfigError, match=message):
        check(config_with(**{"num_inferencer": 2, "master_address": "10.0.0.1", **changes}))


def test_join_port__admits_producers_that_wait_there(config_with):
    def num_looks(port):
        actors, looks = FakeActorGroup(*[[]] * 3, done_after=3), []
        actors.add_joining = lambda: looks.append(1)
        config = config_with(join_port=port)
        takes = config.parallel.join_port is not None
        Supervisor(actors, id, num_producers=1, takes_joining=takes, stall_timeout_s=60.0).run()
        return len(looks)

    assert num_looks(None) == 0 < num_looks(18443)


def test_join_port__what_joined_and_is_lost_is_not_replaced():
    actors = FakeActorGroup(*[[]] * 4, done_after=4)
    actors.producers = {0: FakeMember("producer-0"), 1: FakeMember("producer-1", is_joined=True)}
    actors.heartbeats.hung, dropped = {"producer-1": "silent"}, []

    def drop_producer(producer_id, cause, *, leaves=False):
        dropped.append((producer_id, cause, leaves))
        del actors.producers[producer_id]

    actors.drop_producer, actors.add_joining = drop_producer, lambda: None
    Supervisor(actors, id, num_producers=1, takes_joining=True, stall_timeout_s=60.0).run()
    assert dropped == [(1, "silent", False)] and actors.producers.keys() == {0}


def test_join_host__is_where_the_run_listens(config_with):
    config = config_with(join_port=18443, join_host="localhost")
    assert join_url(config.parallel) == "http://localhost:18443"


def test_join_port__is_the_runs_from_before_ray_starts_until_its_server_listens(config_with):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        held = partial(join_port_held, config_with(join_port=port).parallel)
        with (
            pytest.raises(ConfigError, match=f"--join-port {port}: cannot listen there: Address already in use"),
            held(),
        ):
            pass
    for _ in range(2):  # the second time beside the remains of the first one's connection
        with held():
            with pytest.raises(OSError, match="in use"):
                listen("127.0.0.1", port)
            with pytest.raises(ConfigError, match=f"--join-port {port}: cannot listen there: "), held():
                pass  # of another run
            with listen("127.0.0.1", port, is_shared=True) as server, socket.create_connection(("127.0.0.1", port)):
                server.accept()[0].close()
    with listen("127.0.0.1", port):
        pass


def test_join_cert__and_key_make_it_https_and_have_to_be_files_of_one(config_with, tmp_path):
    files = {"join_cert": str(tmp_path / "no.pem"), "join_key": str(tmp_path / "no.key")}
    config = config_with(join_port=18443, **files)
    assert join_url(config.parallel) == "https://127.0.0.1:18443"
    with pytest.raises(ConfigError, match=r"--join-cert .*no\.pem --join-key .*no\.key: cannot be used"):
        check_join_secrets(config.parallel)


def test_join_key__is_given_with_the_certificate(config_with):
    with pytest.raises(ConfigError, match="--join-cert and --join-key: give both or none"):
        config_with(join_port=18443, join_cert="cert.pem")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"join_host": "10.0.0.5"},
            "--join-host 10.0.0.5 without --join-cert: the token and the weights would",
        ),
        ({"weight_transport": "nccl"}, "--weight-transport nccl with --join-port 18443: the run's own end has no GPU"),
        ({"colocate": True}, "--join-port 18443 with --colocate: its engines are those of -i"),
    ],
)
def test_join_port__that_cannot_be_is_refused(config_with, changes, message):
    with pytest.raises(ConfigError, match=message):
        config_with(join_port=18443, **changes)
