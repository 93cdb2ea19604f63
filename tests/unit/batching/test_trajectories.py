"""Test trajectories of one turn, of several, and of forked episodes: their content and refusals."""

from dataclasses import replace

import numpy as np
import pytest

from coati_rl.batching.episodes import context_tokens, episode_tokens, final_trajectories, is_truncated
from coati_rl.types import Completion, Prompt, SharedPrefix, Turn
from producer.environments.single_turn import single_turns
from tests.unit.batching.trajectories import masked


def test_one_turn_is_the_prompt_outside_of_the_loss_and_then_what_was_sampled():
    completion = Completion(
        token_ids=np.array([8, 9], dtype=np.int32),
        logprobs=np.array([-1.0, -2.0], dtype=np.float32),
        policy_versions=np.array([4, 5], dtype=np.int32),
        finish_reason="length",
        text="ab",
    )
    prompt = Prompt(uid="p0", token_ids=(1, 2, 3), ground_truth="4")
    _, made = single_turns(prompt, [completion, completion], temperature=0.5)
    assert made.token_ids.tolist() == [1, 2, 3, 8, 9]
    assert made.loss_mask.tolist() == [False, False, False, True, True]
    assert made.logprobs.tolist() == [-1.0, -2.0]
    assert made.policy_versions.tolist() == [4, 5]
    assert made.temperature.tolist() == [0.5, 0.5]
    arrays = (made.token_ids, made.loss_mask, made.logprobs, made.policy_versions, made.temperature)
    assert [array.dtype for array in arrays] == [np.int32, np.bool_, np.float32, np.int32, np.float32]
    assert (made.turns, made.prefix) == (
        (Turn(index=0, start=3, end=5, finish_reason="length"),),
        SharedPrefix(num_tokens=3),
    )
    assert (made.episode, made.text, made.num_loss_tokens, made.finish_reason) == (1, "ab", 2, "length")


def test_an_episode_counts_each_of_its_tokens_once_however_many_forks_share_it(forked_group):
    group = forked_group()
    assert episode_tokens(group).tolist() == [6, 2]
    # The prompt's 3, the tool's 2 and the fork's 1 of the first episode, the prompt's 3 of the second.
    assert context_tokens(group).tolist() == [6, 3]
    assert sorted(group.policy_versions.tolist()) == [7] * 7 + [8]


def test_an_episode_is_truncated_if_the_limit_ended_a_turn_of_any_fork(forked_group):
    group = forked_group()
    assert is_truncated(group).tolist() == [True, False]  # the first one's fork ends with "length"
    first, fork, other = group.trajectories
    stopped = replace(fork, turns=tuple(replace(turn, finish_reason="stop") for turn in fork.turns))
    assert is_truncated(replace(group, trajectories=(first, stopped, other))).tolist() == [False, False]
    earlier = replace(first, turns=(replace(first.turns[0], finish_reason="length"), first.turns[1]))
    assert is_truncated(replace(group, trajectories=(earlier, stopped, other))).tolist() == [True, False]


def test_what_is_scored_is_the_last_turn_of_each_episode(forked_group):
    texts = [last.text for last in final_trajectories(forked_group().trajectories)]
    assert texts == ["turn 2 of episode 0", "turn 0 of episode 1"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": np.zeros(4, dtype=np.float32)}, r"temperature of \[4, 5, 5\]: need as many of each as are in"),
        ({"loss_mask": np.ones(9, dtype=bool)}, "10 tokens, a loss_mask of 9 with 9 in the loss"),
        ({"loss_mask": np.arange(10) < 5}, "True on tokens of the shared prefix, or of no turn"),
        ({"loss_mask": np.arange(10) > 4}, "True on tokens of the shared prefix, or of no turn"),
        ({"prefix": SharedPrefix(num_tokens=4)}, "turn 0 has the tokens 3 to 5, and should begin at 4"),
        ({"turns": ()}, "at least one turn"),
        ({"turns": (Turn(index=0, start=3, end=11, finish_reason="stop"),)}, "turn 0 has the tokens 3 to 11"),
    ],
)
def test_a_trajectory_that_contradicts_itself_is_refused(forked_group, changes, message):
    first = forked_group().trajectories[0]
    with pytest.raises(ValueError, match=message):
        replace(first, **changes)


def test_a_sampled_token_may_be_left_out_of_the_loss(forked_group):
    first = forked_group().trajectories[0]
    assert masked(first, first.loss_mask & (np.arange(10) != 8)).num_loss_tokens == 4


def test_a_fork_that_trains_what_its_parent_trains_is_refused(forked_group):
    """A prefix that says less than is shared cannot be known; one that is in the loss, or another's, is."""
    first, fork, other = forked_group().trajectories
    with pytest.raises(ValueError, match="True on tokens of the shared prefix"):
        replace(fork, loss_mask=np.arange(7) == 4)
    changed = replace(fork, token_ids=np.array([1, 2, 3, 10, 99, 22, 15], dtype=np.int32))
    with pytest.raises(ValueError, match="the first 5 tokens of trajectory 1 are not those of its parent"):
        forked_group((first, changed, other))
    long = replace(other, prefix=SharedPrefix(num_tokens=3, parent=None), token_ids=np.array([1, 2, 4, 16, 17]))
    with pytest.raises(ValueError, match="the first 3 tokens of trajectory 2 are not those of its parent"):
        forked_group((first, fork, long))


@pytest.mark.parametrize("parent", [1, 2, 3, -1])
def test_a_fork_has_an_earlier_parent(forked_group, parent):
    first, fork, other = forked_group().trajectories
    with pytest.raises(
        ValueError, match=f"trajectory 1 is a fork of {parent}, which is not an earlier one of its episode"
    ):
        forked_group((first, replace(fork, prefix=SharedPrefix(num_tokens=5, parent=parent)), other))


def test_a_fork_belongs_to_its_parents_episode(forked_group):
    first, fork, other = forked_group().trajectories
    with pytest.raises(ValueError, match="trajectory 1 is a fork of 0, which is not an earlier one of its episode"):
        forked_group((first, replace(fork, episode=1), other))


def test_a_group_has_a_score_of_each_episode_and_trajectories_in_their_order(forked_group):
    first, fork, other = forked_group().trajectories
    for trajectories, scores in (
        ((first, fork, other), (1.0,)),
        ((first, fork, other), (1.0, 0.0, 0.0)),
        ((first, fork), (1.0, 0.0)),
        ((other, first, fork), (1.0, 0.0)),
        ((), ()),
    ):
        with pytest.raises(ValueError, match=f"{len(scores)} scores: need trajectories of episode 0, 1, ... in order"):
            forked_group(trajectories, rewards=scores)


def test_a_token_that_nothing_predicts_is_not_in_the_loss(forked_group):
    from_nothing = {
        "prefix": SharedPrefix(num_tokens=0),
        "turns": (Turn(index=0, start=0, end=10, finish_reason="stop"),),
    }
    first = forked_group().trajectories[0]
    assert replace(first, **from_nothing).num_loss_tokens == 5
    ones = np.ones(10, dtype=np.float32)
    arrays = {"logprobs": ones, "policy_versions": ones, "temperature": ones, "loss_mask": ones > 0}
    with pytest.raises(ValueError, match="True on the first token, which no token predicts"):
        replace(first, **from_nothing, **arrays)
