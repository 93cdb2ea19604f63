"""Test who is put on which node: small clusters, as one would fill them by hand."""

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coati_rl.config import Config
from coati_rl.preflight.placement import ActorResources, Actors, ClusterNode, Request, assign_nodes, explain

GPU = ActorResources(cpus=1, gpus=1)


def nodes(*gpus, cpus=64):
    """Nodes a, b, c ... with so many GPUs."""
    return [
        ClusterNode(node_id="abcd"[i], address=f"10.0.0.{i}", cpus=cpus, gpus=count) for i, count in enumerate(gpus)
    ]


def request(trainers=1, producers=1, *, group=1, width=1, **others):
    engines = Actors(producers, ActorResources(cpus=1, gpus=width))
    return Request(actors={"trainer": Actors(trainers, GPU), "producer": engines, **others}, group_size=group)


def placed(nodes_left, wanted):
    places = assign_nodes(nodes_left, wanted)
    return places and ("".join(places["trainer"]), "".join(places["producer"]))


@pytest.mark.parametrize(
    ("gpus", "wanted", "trainers", "producers"),
    [
        ((8,), request(4, 4), "aaaa", "aaaa"),
        ((8, 8), request(8, 8), "aaaaaaaa", "bbbbbbbb"),
        ((8, 8), request(4, 2, width=4), "aaaa", "ba"),  # the emptier node first
        ((2, 4, 2), request(4, 4), "bbbb", "acac"),  # the tightest node that holds all trainers; producers spread
        ((4, 4, 8), request(8, 8), "cccccccc", "abababab"),
        ((4, 4), request(6, 2), "aaaabb", "bb"),  # too many for one node: contiguous by node
        ((3, 3), request(4, 2, group=2), "aabb", "ab"),  # a tensor-parallel pair is not split: 2 and 2, not 3 and 1
        ((3, 1), request(4, 0, group=2), "aaab", ""),  # where it must be, it is
        ((6, 6), request(4, 2, width=4), "aabb", "ab"),  # trainers on one node would leave 2: producers choose first
        ((6, 6), request(4, 2, width=4, group=4), "aabb", "ab"),  # the group gives way before the engine
        ((0, 8), request(1, 1, width=4), "b", "b"),  # a head without GPUs
    ],
)
def test_a_cluster_is_filled(gpus, wanted, trainers, producers):
    assert placed(nodes(*gpus), wanted) == (trainers, producers)


@pytest.mark.parametrize(
    ("gpus", "wanted"),
    [
        ((4, 4), request(8, 1)),
        ((3, 3), request(0, 1, width=4)),  # 6 GPUs are free, but an engine is not split between nodes
        ((4,), request(1, 1, width=4)),
        ((), request(1, 0)),
    ],
)
def test_no_room_is_no_places(gpus, wanted):
    assert assign_nodes(nodes(*gpus), wanted) is None


def test_cpus_count_as_well():
    assert placed(nodes(8, 8, cpus=2), request(2, 2)) == ("aa", "bb")
    assert assign_nodes(nodes(8, cpus=2), request(2, 1)) is None


def test_the_refusal_says_what_is_missing_and_what_each_node_has():
    totals = nodes(4, 4)
    free = [totals[0].without(GPU, 3), totals[1].without(GPU)]
    assert explain(free, totals, request(2, 2, width=2)) == (
        "requested 2 trainer(s) of 1 CPU and 1 GPU and 2 producer(s) of 1 CPU and 2 GPUs on one node; "
        "no resources for 1 producer(s); free: 10.0.0.0 61 of 64 CPUs, 1 of 4 GPUs; 10.0.0.1 63 of 64 CPUs, 3 of 4 GPUs"
    )
    assert "no resources for 1 trainer(s); free: no node answers" in explain([], [], request(1, 0))


@pytest.mark.parametrize(
    ("device", "trainer", "producer"),
    [
        ("cuda", ActorResources(cpus=1, gpus=1), ActorResources(cpus=1, gpus=2)),
        ("cpu", ActorResources(cpus=1, gpus=0), ActorResources(cpus=2, gpus=0)),  # a process for each rank
    ],
)
def test_what_a_run_asks_for(device, trainer, producer):
    config = Config(
        num_trainers=8,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        num_inferencer=3,
        producer_tensor_parallel_size=2,
        model="m",
        dataset="d",
    )
    wanted = Request.of(config, device)
    assert (wanted.group_size, wanted.actors["trainer"], wanted.actors["producer"]) == (4, (8, trainer), (3, producer))


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 8), max_size=4),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 4),
    st.integers(0, 4),
    st.sampled_from([1, 2, 4]),
)
def test_places_fit_and_are_found_whenever_there_are_any(gpus, group, num_groups, producers, width):
    wanted = request(group * num_groups, producers, group=group, width=width)
    places = assign_nodes(nodes(*gpus), wanted)
    has_room = sum(count // width for count in gpus) >= producers
    assert (places is not None) == (has_room and sum(gpus) >= group * num_groups + producers * width)
    if places is not None:
        for node, count in zip("abcd"[: len(gpus)], gpus, strict=True):
            assert places["trainer"].count(node) + width * places["producer"].count(node) <= count
        blocks = [node for node, _ in groupby(places["trainer"])]
        assert len(blocks) == len(set(blocks)), "a node's trainers have consecutive ranks"


@pytest.mark.parametrize(
    ("gpus", "num_models", "expected"),
    [
        ((8,), 2, "aa"),
        ((2, 4, 2), 2, "bb"),  # trainers on a, producers on b: the fuller node first
        ((2, 3), 1, "b"),  # no node is left with two, and one has room
    ],
)
def test_reward_models_go_where_room_is_left(gpus, num_models, expected):
    wanted = request(2, 2, **{"reward model": Actors(num_models, GPU)})
    assignment = assign_nodes(nodes(*gpus), wanted)
    assert assignment is not None
    assert sorted(assignment["reward model"]) == sorted(expected)


def test_scorers_go_where_room_is_left_and_one_without_a_gpu_is_named():
    wanted = request(2, 2, scorer=Actors(1, GPU))
    assignment = assign_nodes(nodes(4, 1), wanted)
    assert assignment is not None and assignment["scorer"] == ("b",)
    told = explain(nodes(4), nodes(4), wanted)
    assert "1 scorer(s) of 1 CPU and 1 GPU" in told and "no resources for 1 scorer(s)" in told


def test_a_reward_model_without_a_gpu_is_named():
    wanted = request(2, 2, **{"reward model": Actors(1, GPU)})
    assert assign_nodes(nodes(4), wanted) is None
    message = explain(nodes(4), nodes(4), wanted)
    assert "and 1 reward model(s) of 1 CPU and 1 GPU; no resources for 1 reward model(s); free:" in message
