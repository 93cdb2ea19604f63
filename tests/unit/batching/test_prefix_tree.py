"""Test the tree of shared prefixes: each sample is its path, and what is shared is there once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coati_rl.batching.prefix_tree import MIN_SHARED, PrefixNode, build_tree
from tests.examples import examples

PROMPT = [*range(100, 120)]
# Pieces of which samples are made, so that many begin alike, fork anywhere, end inside another, or are copies.
PARTS = st.sampled_from([[1] * 9, [2] * 3, [3] * 8, [1, 2], [4], [*range(10, 30)]])
SAMPLE = st.lists(PARTS, min_size=1, max_size=5).map(lambda parts: [token for part in parts for token in part])
GROUPS = st.lists(SAMPLE, min_size=1, max_size=9)


def tree_of(*samples):
    return build_tree([np.array(sample) for sample in samples])


def test_a_prompt_is_there_once_for_all_its_responses():
    tree = tree_of([*PROMPT, 1, 2], [*PROMPT, 3], [*PROMPT, 4, 5, 6])
    assert tree.nodes == [
        PrefixNode(0, 0, 20, -1),
        PrefixNode(0, 20, 22, 0),
        PrefixNode(1, 20, 21, 0),
        PrefixNode(2, 20, 23, 0),
    ]
    assert tree.num_tokens == 20 + 2 + 1 + 3
    assert tree.path(2) == [0, 3]


def test_a_fork_inside_a_response_branches_there_and_its_nodes_follow_each_other():
    turn = [*range(200, 210)]
    tree = tree_of([*PROMPT, *turn, 1], [*PROMPT, 9], [*PROMPT, *turn, 2])
    assert tree.nodes == [
        PrefixNode(0, 0, 20, -1),
        PrefixNode(0, 20, 30, 0),
        PrefixNode(0, 30, 31, 1),
        PrefixNode(2, 30, 31, 1),
        PrefixNode(1, 20, 21, 0),
    ]


def test_a_copy_and_a_sample_that_another_goes_on_from_add_no_tokens():
    tree = tree_of([*PROMPT, *range(9), 7], PROMPT, [*PROMPT, *range(9), 7])
    assert tree.num_tokens == 30
    assert tree.ends == [1, 0, 1]


def test_few_common_tokens_are_not_opened_but_what_follows_them_is():
    assert tree_of([1] * 7 + [2], [1] * 7 + [3]).num_tokens == 16
    assert tree_of([1] * 8 + [2], [1] * 8 + [3]).num_tokens == 10
    # Two of three go on alike for 12 tokens; the third leaves after 3.
    tree = tree_of([5] * 12 + [1], [5] * 3 + [2], [5] * 12 + [3])
    assert tree.nodes == [
        PrefixNode(0, 0, 12, -1),
        PrefixNode(0, 12, 13, 0),
        PrefixNode(2, 12, 13, 0),
        PrefixNode(1, 0, 4, -1),
    ]


def test_samples_without_a_common_prefix_have_roots_of_their_own():
    tree = tree_of([1, 2], [3, 4, 5])
    assert [node.parent for node in tree.nodes] == [-1, -1]
    assert tree.ends == [0, 1]


@examples(120)
@given(GROUPS)
def test_every_sample_is_its_path_and_every_shared_node_is_long_enough(samples):
    tree = tree_of(*samples)
    members = dict.fromkeys(range(len(tree.nodes)), 0)
    for number, sample in enumerate(samples):
        path = [tree.nodes[node] for node in tree.path(number)]
        assert [token for node in path for token in samples[node.sample][node.start : node.stop]] == sample
        assert [node.start for node in path] == [0, *(node.stop for node in path[:-1])]
        for node in tree.path(number):
            members[node] += 1
    assert all(members.values()), "no node is nobody's"
    for number, count in members.items():
        node = tree.nodes[number]
        assert node.parent < number
        assert count == 1 or node.stop - node.start >= MIN_SHARED
    assert tree.num_tokens <= sum(map(len, samples))


@examples(120)
@given(GROUPS)
def test_the_number_of_tokens_does_not_depend_on_the_order(samples):
    assert tree_of(*samples).num_tokens == tree_of(*samples[::-1]).num_tokens
