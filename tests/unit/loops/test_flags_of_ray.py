"""Test fields of our own Ray and of the trainers' store, and that other users cannot access them.

The part of a test's name before two underscores is the field (see test_flags.py).
"""

import socket
import stat
import tempfile
from pathlib import Path

import pytest

import consumer.actor
from coati_rl.config.cli import build_job
from coati_rl.config.commands import OFFLINE
from coati_rl.driver import launch
from coati_rl.errors import ConfigError, RunError
from coati_rl.preflight import prepare_offline
from coati_rl.processes.actor_process import ActorContext
from coati_rl.runtime import address, cluster
from consumer.parallel.store_location import StoreLocation


def test_ray_dir__is_where_ray_puts_its_sockets_and_logs_below_a_directory_that_nobody_else_enters(
    ray_calls, config_with, tmp_path
):
    ray_dir = tmp_path / "a directory whose name alone is longer than the path of a socket may be" / "ray"
    with tempfile.TemporaryDirectory(prefix="coati-", dir="/tmp") as scratch:
        sizes = {"num_cpus": 2, "num_gpus": 0, "scratch": Path(scratch)}
        with cluster.ray_cluster(config_with(ray_dir=str(ray_dir)), **sizes):
            assert address.own_address(config_with()) == "127.0.0.1"
        session = Path(ray_calls[0]["_temp_dir"]).resolve()
    (own,) = ray_dir.iterdir()
    assert session == own / "ray"
    assert session.is_dir() and stat.S_IMODE(own.stat().st_mode) == 0o700


def test_ray_dir__is_a_subdirectory_of_the_runs_own_temporary_directory_by_default(ray_calls, config_with):
    with cluster.ray_cluster(config_with(), num_cpus=2, num_gpus=0, scratch=Path("/tmp/coati-12345678")):
        pass
    assert [call["_temp_dir"] for call in ray_calls] == ["/tmp/coati-12345678/ray"]


def test_ray_dir__is_where_the_logs_are_of_a_ray_that_did_not_start(monkeypatch, config_with):
    def init(**options):
        raise Exception("The current node timed out during startup.\nThis could happen because")  # as Ray's node.py

    monkeypatch.setattr(cluster.ray, "init", init)
    sizes = {"num_cpus": 2, "num_gpus": 0, "scratch": Path("/tmp/coati-12345678")}
    told = "Ray did not start on this machine: The current node timed out during startup. This .*; .* give --ray_dir"
    with pytest.raises(RunError, match=told), cluster.ray_cluster(config_with(), **sizes):
        pass


def test_ray_dir__in_which_others_could_put_a_directory_of_theirs_is_refused(
    ray_calls, start_ray, config_with, tmp_path
):
    ray_dir = tmp_path / "ray"
    ray_dir.mkdir()
    ray_dir.chmod(0o777)
    with pytest.raises(
        ConfigError, match=rf"--ray_dir {ray_dir}: every user may .* \(mode 0777\): `chmod o-w {ray_dir}`"
    ):
        start_ray(config_with(ray_dir=str(ray_dir)))
    ray_dir.chmod(0o1777)
    start_ray(config_with(ray_dir=str(ray_dir)))
    assert len(ray_calls) == 1


def test_ray_dir__that_cannot_be_made_is_refused(ray_calls, start_ray, config_with, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"--ray_dir {tmp_path}/file/ray: cannot be written: "):
        start_ray(config_with(ray_dir=str(tmp_path / "file" / "ray")))
    assert ray_calls == []


def test_a_temporary_directory_with_a_name_too_long_for_ray_is_refused(ray_calls, config_with, tmp_path):
    with (
        pytest.raises(ConfigError, match=r"TMPDIR .* too long .* which leave it 24 characters; set TMPDIR=/tmp"),
        cluster.ray_cluster(config_with(), num_cpus=2, num_gpus=0, scratch=Path("/") / ("t" * 24) / "coati-12345678"),
    ):
        pass
    assert ray_calls == []


@pytest.fixture
def store_location_of(monkeypatch, tmp_path):
    """Return the store location of a configuration's trainers, from rank 0; nothing listens there any more."""

    def make(config):
        monkeypatch.setattr(consumer.actor, "enter_actor", lambda context: None)
        monkeypatch.setattr(consumer.actor, "own_address", lambda config: "127.0.0.1")
        context = ActorContext(name="trainer-0", log_dir=tmp_path, device="cpu", dtype="float32", slot=0, num_slots=1)
        trainer = consumer.actor.TrainerActor(0, config, context, run_dir=tmp_path, checkpoint_dir=tmp_path)
        rendezvous = trainer.open_rendezvous()
        if trainer._listener is not None:
            trainer._listener.close()
        return rendezvous

    return make


def test_master_port__is_where_the_trainers_meet_and_the_runs_from_its_begin_on(store_location_of, config_with):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = config_with(master_port=port)
    with launch.ports_held(config):
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))
        assert store_location_of(config) == StoreLocation(address="127.0.0.1", port=port)
    assert store_location_of(config_with(master_port=0, master_address="10.0.0.1")).port > 0


def test_master_port__is_not_needed_on_one_machine_where_the_trainers_meet_in_a_private_file(
    monkeypatch, store_location_of, config_with, tmp_path
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rendezvous = store_location_of(config_with())
    assert rendezvous.port == 0
    assert rendezvous.file.is_relative_to(tmp_path)
    assert stat.S_IMODE(rendezvous.file.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(("flags", "is_said"), [({}, True), ({"master_address": "10.0.0.9"}, False)])
def test_ray_dir__has_no_effect_on_a_job_that_starts_no_ray_which_is_said(flags, is_said):
    config = build_job({"model": "m", "dataset": "d", "ray_dir": "/tmp/ray", **flags}, OFFLINE["sft"])
    assert ["--ray_dir: has no effect" in each for each in prepare_offline.without_effect(config)] == [True] * is_said
