"""Test PlacementManager in a real Ray of one node with 4 CPUs: reservation, numbering, reuse, refusal."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def got():
    """Return the reservations of a run of 2 trainers and a producer of 2 ranks, and of other runs at the same time."""
    script = Path(__file__).with_name("placement_process.py")
    root = script.parents[3]
    with tempfile.TemporaryDirectory(prefix="reservations-") as scratch:
        result = subprocess.run(
            [sys.executable, str(script), scratch],
            cwd=root,
            env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.full
def test_seats_are_numbered_within_their_node(got):
    assert got["slots"] == [[0, 3], [1, 3], [2, 3]]
    assert got["cpus"] == [2, 1, 1], "the producer has a process for each rank"


def test_trainers_are_reserved_together_and_each_producer_by_itself(got):
    assert got["trainers_share_a_group"]


def test_a_successor_sits_where_the_lost_producer_sat(got):
    assert got["successor_has_the_same"]


def test_engines_that_take_turns_have_the_places_and_cores_of_their_trainers(got):
    # Bundle of the first trainer, slot of how many, threads, CPUs that are asked for besides.
    assert got["in_turns"] == {"engines": [[0, 0, 2, 6, 0], [2, 1, 2, 6, 0]], "placed_alone": 0}


def test_what_is_reserved_is_not_given_to_another_run(got):
    assert got["occupied"].startswith(
        "RunError: the Ray cluster stayed occupied for 0 s: requested 1 trainer(s) of 1 CPU"
    )
    assert "no resources for 1 trainer(s) and 1 producer(s); free: " in got["occupied"]
    assert got["occupied"].endswith(" 0 of 4 CPUs, 0 of 0 GPUs")


def test_a_cluster_that_can_never_hold_the_run_is_refused(got):
    start = "ConfigError: the Ray cluster is too small: requested"
    assert got["too_small"].startswith(f"{start} 3 trainer(s) of 1 CPU and 2 producer(s) of 1 CPU on one node; ")
    assert "no resources for 1 trainer(s); free: " in got["too_small"]
    assert got["no_gpu"].startswith(f"{start} 1 trainer(s) of 1 CPU and 1 GPU and ")
    assert got["no_gpu"].endswith("4 of 4 CPUs, 0 of 0 GPUs; lower -i, -ptp or -t, or add nodes")


def test_a_dead_raylet_is_seen_at_once_and_without_asking_ray(got):
    assert got["dead_raylets_before"] == []
    assert got["dead_raylets"] == [got["address"]]
