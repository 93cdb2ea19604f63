"""Test that a packed group is restored as it was sampled, and does not hold its prompt."""

import pickle
from dataclasses import fields, replace

import numpy as np
import pytest

from coati_rl.algorithms.advantage import group_norm, reward
from coati_rl.batching.group_rules import GroupRules
from coati_rl.batching.packed_group import PackedGroup
from coati_rl.batching.sample_builder import build_samples
from coati_rl.checkpoint.untrained_rollouts import UntrainedRollouts
from coati_rl.coordinator.rollout_statistics import rollout_statistics
from coati_rl.run_lengths import decode_runs, encode_runs
from coati_rl.types import Prompt
from tests.unit.batching.trajectories import trajectory


def content(group):
    """All of it, in what `==` compares."""
    trajectories = [
        [
            (str(value.dtype), value.tolist()) if isinstance(value, np.ndarray) else value
            for value in (getattr(each, field.name) for field in fields(each))
        ]
        for each in group.trajectories
    ]
    return {field.name: getattr(group, field.name) for field in fields(group) if field.compare} | {
        "trajectories": trajectories
    }


def sent(group):
    packed = pickle.loads(pickle.dumps(PackedGroup.pack(group), protocol=5))
    return packed.unpack(group.prompt, temperature=group.temperature)


def test_a_group_arrives_as_it_was(group_of, forked_group):
    plain = group_of([(1.0, 2), (0.0, 0), (0.5, 3, "invalid", "length")])
    assert content(sent(plain)) == content(plain)
    forked = forked_group()
    assert content(sent(forked)) == content(forked)


def test_a_sequence_of_another_context_than_the_prompt_arrives_as_it_was(forked_group):
    own_context = trajectory([40, 41, 18], (2, 3), episode=1, shared=0, index=1)
    part_of_it = trajectory([1, 2, 42, 19], (3, 4), episode=1, shared=2, index=2, version=5)
    group = forked_group((*forked_group().trajectories, own_context, part_of_it))
    assert content(sent(group)) == content(group)


def test_neither_the_prompt_nor_what_a_fork_shares_travels(forked_group, group_of):
    packed = PackedGroup.pack(forked_group())
    assert packed.token_ids.tolist() == [10, 11, 20, 21, 12, 13, 14, 22, 15, 16, 17]
    assert packed.logprobs.tolist() == [-3 / 8, -4 / 8, -7 / 8, -1.0, -9 / 8, -6 / 8, -3 / 8, -4 / 8]
    assert packed.loss_mask == ((True, 2), (False, 2), (True, 3), (False, 1), (True, 3))
    assert packed.policy_versions == ((7, 5), (8, 1), (7, 2))
    long = Prompt(uid="p0", token_ids=tuple(range(1000)), ground_truth="x" * 5000, text="y" * 5000)
    group = replace(sent_to(long, group_of), prompt=long)
    assert len(pickle.dumps(PackedGroup.pack(group), protocol=5)) < 2000


def test_samples_statistics_and_a_checkpoint_do_not_restore_the_trajectories_of_single_answers(group_of, monkeypatch):
    group = sent(group_of([(1.0, 2), (0.0, 3, "ok", "length")]))
    monkeypatch.setattr(PackedGroup, "_restore", None)
    rules = GroupRules(max_new_tokens=10, filter_truncated_response=True, over_length_cache=8)
    samples = build_samples(group, rules=rules, loss_variation="token_level", estimator=reward)
    assert [(sample.number, sample.num_loss_tokens) for sample in samples] == [(0, 2)]
    statistics = rollout_statistics([group], [], rules=rules, staleness=lambda version: version)
    assert (statistics["response_tokens_mean"], statistics["truncated_fraction"]) == (2.5, 0.5)
    UntrainedRollouts(dropped=(group,)).to_bytes()
    assert len(group.trajectories) == 2


def test_the_samples_of_a_group_are_the_same_after_it_was_sent(group_of, forked_group):
    own_context = trajectory([40, 41, 18], (2, 3), episode=1, shared=0, index=1)
    for group in (
        group_of([(1.0, 2), (0.0, 3)]),
        forked_group(),
        forked_group((*forked_group().trajectories, own_context)),
    ):
        first, second = (
            build_samples(
                each, rules=GroupRules(max_new_tokens=10), loss_variation="sample_level", estimator=group_norm
            )
            for each in (group, sent(group))
        )
        assert [repr(sample) for sample in first] == [repr(sample) for sample in second]
        lengths = [sum(s.num_loss_tokens for s in samples) for samples in (first, second)]
        assert lengths == [len(group.policy_versions)] * 2


def test_an_answer_that_no_token_predicts_is_refused(group_of):
    packed = PackedGroup.pack(group_of([(1.0, 2), (0.0, 3)]))
    with pytest.raises(ValueError, match="True on the first token"):
        packed.unpack(Prompt(uid="p0", token_ids=(), ground_truth=""), temperature=1.0)


def sent_to(prompt, group_of):
    """A group of two short responses to another prompt."""
    packed = PackedGroup.pack(group_of([(1.0, 2), (0.0, 3)]))
    return packed.unpack(prompt, temperature=0.7)


def test_a_token_of_one_turn_takes_eight_bytes_beside_its_text(group_of):
    def size(num_tokens):
        group = group_of([(1.0, num_tokens), (0.0, num_tokens)])
        bare = replace(group, trajectories=tuple(replace(each, text="") for each in group.trajectories))
        return len(pickle.dumps(PackedGroup.pack(bare), protocol=5))

    assert size(1100) - size(100) == pytest.approx(2 * 1000 * 8, abs=16)


def test_a_group_whose_arrays_do_not_fit_together_is_refused(forked_group):
    packed = PackedGroup.pack(forked_group())
    prompt = forked_group().prompt
    for changes, message in (
        ({"trajectories": packed.trajectories[:2]}, r"9 tokens, 8 in the loss, and arrays of \(11, 11, 8, 8, 8\)"),
        ({"token_ids": packed.token_ids[1:]}, r"11 tokens, 8 in the loss, and arrays of \(10, 11, 8, 8, 8\)"),
        ({"logprobs": packed.logprobs[1:]}, r"11 tokens, 8 in the loss, and arrays of \(11, 11, 7, 8, 8\)"),
        ({"policy_versions": ((7, 9),)}, r"11 tokens, 8 in the loss, and arrays of \(11, 11, 8, 9, 8\)"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(packed, **changes).unpack(prompt, temperature=1.0)


@pytest.mark.parametrize("values", [[], [3], [3, 3, 3], [1, 2, 2, 1]])
def test_runs_are_read_back(values):
    array = np.array(values, dtype=np.int32)
    runs = encode_runs(array)
    assert sum(length for _, length in runs) == len(values)
    decoded = decode_runs(runs, np.int32)
    assert (decoded.dtype, decoded.tolist()) == (np.int32, values)
