"""Test that routes stay with their tokens: from an episode's passes to a group, its records, and rows of a trainer.

One layer, one expert: a route is the expert's number, 255 where it is not known.
"""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest

from coati_rl.algorithms.advantage import reward
from coati_rl.batching.group_rules import GroupRules
from coati_rl.batching.packed_group import PackedGroup
from coati_rl.batching.packing import pack
from coati_rl.batching.sample_builder import build_samples
from coati_rl.checkpoint.ledger_groups import group_from_bytes, group_to_bytes
from coati_rl.checkpoint.untrained_rollouts import FinishedGroup, UntrainedRollouts
from coati_rl.observability.rollouts import RolloutRecorder
from coati_rl.routes import route_dtype, routes_of_json
from coati_rl.samples import Sample
from coati_rl.types import Completion
from producer.environments.trajectories import AnswerNode, make_trajectories

UNKNOWN = 255
# Of prompt 1 2 3, a turn 10 11, a tool's answer 20 21, a turn 12 13 14: the engine knows no last token of a turn.
WHOLE = [1, 2, 3, 4, UNKNOWN, 6, 7, 8, 9, UNKNOWN]
# A fork after 10 11, and an episode whose engine found the first two tokens in its cache and said nothing of them.
FORK, OTHER = [51, 52, 53, 54, 55, 56, UNKNOWN], [UNKNOWN, UNKNOWN, 33, 34, UNKNOWN]


def routes(experts, dtype=np.uint8):
    return np.array(experts, dtype=dtype).reshape(-1, 1, 1)


def experts(found):
    return None if found is None else found.reshape(-1).tolist()


@pytest.fixture
def group(forked_group):
    trajectories = forked_group().trajectories
    each = zip(trajectories, (WHOLE, FORK, OTHER), strict=True)
    return replace(forked_group(), trajectories=tuple(replace(t, routes=routes(r)) for t, r in each))


def restored(group):
    packed = pickle.loads(pickle.dumps(PackedGroup.pack(group), protocol=5))
    return packed.unpack(group.prompt, temperature=group.temperature)


def test_a_shared_prefix_has_the_routes_of_the_first_that_knows_them(group):
    back = restored(group)
    assert [experts(each.routes) for each in back.trajectories] == [
        WHOLE,
        [1, 2, 3, 4, UNKNOWN, 56, UNKNOWN],  # the first five tokens are its parent's
        [1, 2, 3, 34, UNKNOWN],
    ]
    later = restored(
        replace(group, trajectories=(replace(group.trajectories[0], routes=None), *group.trajectories[1:]))
    )
    assert [experts(each.routes) for each in later.trajectories] == [
        [UNKNOWN, UNKNOWN, 33, *[UNKNOWN] * 7],
        [UNKNOWN, UNKNOWN, 33, UNKNOWN, UNKNOWN, 56, UNKNOWN],
        [UNKNOWN, UNKNOWN, 33, 34, UNKNOWN],
    ]
    with pytest.raises(ValueError, match="11 tokens after 3, and routes of 13"):
        replace(PackedGroup.pack(group), routes=routes([0] * 13)).unpack(group.prompt, temperature=0.7)


def test_a_ledger_a_checkpoint_and_a_record_keep_them(group, tmp_path):
    expected = [experts(each.routes) for each in restored(group).trajectories]
    back = group_from_bytes(group_to_bytes(group), lease_id=3, prompt_of=lambda _: group.prompt)
    assert [experts(each.routes) for each in back.trajectories] == expected
    plain = replace(group, trajectories=tuple(replace(each, routes=None) for each in group.trajectories))
    many = replace(group, trajectories=tuple(replace(t, routes=t.routes * np.uint16(257)) for t in group.trajectories))
    kept = UntrainedRollouts(
        finished=tuple(FinishedGroup(group=each, sync_index=0) for each in (plain, many)), dropped=(group,)
    )
    read = UntrainedRollouts.from_bytes(kept.to_bytes(), lambda _: group.prompt)
    groups = [*(each.group for each in read.finished), *read.dropped]
    assert [[experts(each.routes) for each in one.trajectories] for one in groups] == [
        [None] * 3,
        [[257 * expert for expert in each] for each in expected],
        expected,
    ]
    RolloutRecorder(tmp_path).write(1, [restored(group)], advantages={})
    (path,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [experts(routes_of_json(line["routes"])) for line in lines] == expected


def test_tokens_of_an_earlier_turn_keep_the_routes_of_the_pass_that_sampled_after_them():
    def answered(token_ids, num_context, known, parent=None, index=0):
        sampled = np.array(token_ids[num_context:], dtype=np.int32)
        zeros = np.zeros(len(sampled), dtype=np.float32)
        completion = Completion(
            token_ids=sampled,
            logprobs=zeros,
            policy_versions=zeros.astype(np.int32),
            finish_reason="stop",
            text="",
            routes=routes(known),
        )
        node = AnswerNode(
            token_ids=token_ids, text="", messages=(), num_context=num_context, parent=parent, index=index
        )
        return replace(node, completion=completion)

    first = answered((1, 2, 3, 10, 11), 3, [1, 2, 3, 4])
    second = answered((1, 2, 3, 10, 11, 20, 12, 13), 6, [91, 92, 93, 94, 5, 6, 7], parent=first, index=1)
    cut_back = answered((1, 2, 3, 10, 11, 21, 14), 6, [71, 72, 73, 74, 75, 8], parent=first, index=2)
    made = make_trajectories([first, second, cut_back], (1, 2, 3), episode=0)
    assert [experts(each.routes) for each in made] == [[1, 2, 3, 4, 5, 6, 7, UNKNOWN], [1, 2, 3, 4, 75, 8, UNKNOWN]]


@pytest.mark.parametrize("is_packed", [True, False])
def test_rows_have_the_route_of_each_of_their_tokens(group, is_packed):
    rules = GroupRules(max_new_tokens=10)
    samples = build_samples(restored(group), rules=rules, loss_variation="token_level", estimator=reward)
    ((micro_batch,),) = pack(samples, max_samples=3, one_sample_per_row=not is_packed)
    by_token = {(10, 4), (14, UNKNOWN), (15, UNKNOWN), (16, 34), (17, UNKNOWN), (22, 56), (20, 6)}
    pairs = zip(micro_batch.token_ids.reshape(-1).tolist(), experts(micro_batch.routes), strict=True)
    assert by_token <= {*pairs}
    assert micro_batch.routes.shape == (*micro_batch.token_ids.shape, 1, 1)
    padding = micro_batch.routes[micro_batch.token_ids == 0]
    assert (padding == UNKNOWN).all()


def test_a_token_that_samples_share_has_the_route_of_the_first_that_knows_it():
    prompt = np.arange(1, 13)

    def sample(number, known):
        return Sample(
            uid="p0",
            number=number,
            prefix_ids=prompt.copy(),  # of another object: else its routes are those of the first, as they are one's
            token_ids=np.array([20 + number]),
            loss_mask=np.ones(1, dtype=bool),
            arrays={"temperature": 1.0},
            routes=routes([*known, UNKNOWN]),
        )

    samples = [sample(0, [UNKNOWN] * 6 + [7] * 6), sample(1, [9] * 12)]
    ((micro_batch,),) = pack(samples, max_samples=2, shares_prefixes=True)
    assert experts(micro_batch.routes) == [9] * 6 + [7] * 6 + [UNKNOWN] * 2


def test_numbers_of_experts_take_a_byte_as_long_as_one_number_is_left():
    assert [route_dtype(number) for number in (8, 254, 255, 256)] == [np.uint8, np.uint8, np.uint16, np.uint16]
