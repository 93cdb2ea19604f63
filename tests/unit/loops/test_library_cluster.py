"""Test what a cluster of the library refuses."""

import sys
from types import SimpleNamespace

import pytest

import coati
from coati.ray_cluster import Cluster
from coati_rl.config import Config
from coati_rl.errors import ConfigError


class Places:
    def __init__(self, config, device):
        self.trainers = ["here"]

    def acquire(self):
        return "here"


class Member:
    def __init__(self, name, places, *_, **__):
        self.size = len(places)


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """A cluster with two places for engines, of one rank each."""
    monkeypatch.setitem(sys.modules, "coati_rl.runtime.placement_manager", SimpleNamespace(PlacementManager=Places))
    monkeypatch.setitem(sys.modules, "coati_rl.runtime.members", SimpleNamespace(RemoteMembers=Member))
    return Cluster(Config(num_inferencer=2, num_trainers=1), "cpu", tmp_path)


def test_an_engine_takes_all_places_once(cluster):
    assert cluster.engines(Config()).size == 2
    with pytest.raises(ConfigError, match="places for engines are taken"):
        cluster.engines(Config())


def test_an_engine_that_is_wider_than_its_places_is_refused(cluster):
    with pytest.raises(ConfigError, match="producer_tensor_parallel_size=2: the cluster has places for 1"):
        cluster.engines(Config(producer_tensor_parallel_size=2))


def test_each_name_is_what_it_says_after_all_modules_are_loaded():
    found = {name: getattr(coati, name) for name in coati.__all__}
    assert all(callable(each) for each in found.values()), found
    assert found == {name: getattr(coati, name) for name in coati.__all__}


def test_ray_that_was_imported_without_its_settings_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ConfigError, match="imported before"), coati.cluster(device="cpu"):
        raise AssertionError("it was not refused")
