"""Test what of an episode's returned values is taken, and that whatever is no value of its kind is refused by name."""

import math

import numpy as np
import pytest

from producer.environments.episode import EpisodeFailure, Step
from producer.environments.returned_steps import as_info, as_observation, as_rewards, as_step

USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("value", "step"),
    [
        (("next", 0.5, False), Step(observation="next", reward={"env": 0.5})),
        (("next", 0.5, False, {"a": 1}), Step(observation="next", reward={"env": 0.5}, info={"a": 1})),
        (([USER], {"hit": 1, "cost": -2}, 0), Step(observation=[USER], reward={"hit": 1.0, "cost": -2.0})),
        # Gymnasium's five: an episode is over if it is terminated or truncated.
        (("next", 0.5, False, False, {}), Step(observation="next", reward={"env": 0.5})),
        (("next", 0.5, True, False, {}), Step(observation=None, reward={"env": 0.5}, done=True)),
        (("next", 0.5, False, True, {}), Step(observation=None, reward={"env": 0.5}, done=True)),
        ((None, np.float32(0.5), np.bool_(True)), Step(observation=None, reward={"env": 0.5}, done=True)),
        # Nobody reads what is said after the end.
        ((object(), 1.0, True), Step(observation=None, reward={"env": 1.0}, done=True)),
        (
            Step(observation=(5, 6), sampling={"top_k": np.int64(3)}),
            Step(observation=[5, 6], reward={"env": 0.0}, sampling={"top_k": 3}),
        ),
    ],
)
def test_a_step_is_a_step_or_a_tuple_of_three_to_five(value, step):
    assert as_step(value) == step


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("next", "step returned 'next' (str); return a Step, or (observation, reward, done, info)"),
        (("next", 0.5), "step returned ('next', 0.5) (tuple); return a Step"),
        (("next", math.nan, False), "reward is nan (float); return a finite number of at most 1e+09"),
        (("next", {"hit": math.inf}, False), "reward 'hit' is inf (float); return a finite number"),
        (("next", -1e10, False), "reward is -10000000000.0 (float); return a finite number"),
        (("next", "1", False), "reward is '1' (str); return a finite number"),
        (("next", 0.5, 2), "done is 2 (int); return True or False"),
        (("next", 0.5, False, 2, {}), "done is 2 (int); return True or False"),
        (("next", 0.5, False, ["a"]), "info is ['a'] (list); return a dictionary"),
        ((3.5, 0.5, False), "the observation is 3.5 (float); return text, messages, token ids or None"),
        (([True], 0.5, False), "the observation is [True] (list); return text, messages, token ids or None"),
        (([-1], 0.5, False), "the observation is [-1] (list); return text"),
        (([{"content": "x"}], 0.5, False), "a message is {'content': 'x'} (dict); it needs a role"),
        (("\ud800", 0.5, False), "the observation is no text that can be encoded: it holds half of a surrogate pair"),
        (Step(sampling=[1]), "sampling is [1] (list); return a dictionary, or None"),
        (
            Step(answer=USER),
            "the answer of a Step is {'role': 'user', 'content': 'x'} (dict); return a message of the role",
        ),
    ],
)
def test_another_value_is_refused_by_name(value, message):
    with pytest.raises(EpisodeFailure) as caught:
        as_step(value)
    assert str(caught.value).startswith(message)


def test_an_observation_is_text_a_message_several_of_them_token_ids_or_nothing():
    given = ["", USER, [USER, USER], (5, 0), np.array([5, 6]), [], None]
    assert [as_observation(each) for each in given] == ["", [USER], [USER, USER], [5, 0], [5, 6], None, None]


def test_an_info_is_json_with_text_for_what_is_not_and_what_is_too_long_is_cut():
    info = as_info({1: np.array([0.5]), "f": math.nan, "o": {1, 2} and object})
    assert (info["1"], info["f"]) == ([0.5], "NaN") and "object" in info["o"]
    assert as_info(None) == {}
    (cut,) = as_info({"long": "x" * 70_000}).values()
    assert len(cut) < 300 and "70012 characters, 65536 are kept" in cut


def test_nothing_is_no_reward():
    assert as_rewards(None) == {}
    assert as_rewards(2) == {"env": 2.0}
