"""Test what Ray is told before it is imported."""

import os

import pytest

from coati_rl.config import Config
from coati_rl.processes.ray_environment import actor_environment, prepare_ray_environment


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    monkeypatch.setattr(os, "environ", {})


def test_a_ray_of_our_own_has_a_new_token_for_every_run():
    prepare_ray_environment(Config())
    first = os.environ.pop("RAY_AUTH_TOKEN")
    prepare_ray_environment(Config())
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert len(first) == 64 and first != os.environ["RAY_AUTH_TOKEN"]


def test_a_cluster_that_is_joined_keeps_its_token():
    prepare_ray_environment(Config(master_address="10.0.0.1"))
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert "RAY_AUTH_TOKEN" not in os.environ


def test_what_the_user_has_set_stays():
    os.environ.update(RAY_AUTH_TOKEN="mine", RAY_AUTH_MODE="disabled")
    prepare_ray_environment(Config())
    assert (os.environ["RAY_AUTH_TOKEN"], os.environ["RAY_AUTH_MODE"]) == ("mine", "disabled")


def test_a_ray_of_our_own_listens_on_loopback_alone_and_a_cluster_of_several_machines_does_not():
    prepare_ray_environment(Config(master_address="10.0.0.1"))
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in os.environ
    prepare_ray_environment(Config())
    assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"


def test_calls_carry_messages_of_up_to_512_kib_unless_the_user_sets_another_limit():
    name = "RAY_max_direct_call_object_size"
    prepare_ray_environment(Config())
    assert os.environ[name] == "524288"
    os.environ[name] = "5000"
    prepare_ray_environment(Config())
    assert actor_environment()[name] == "5000"
