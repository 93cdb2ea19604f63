"""Test that a coordinator's state comes back from JSON with its types, and that a file decides nothing but values."""

import json
from collections import Counter, deque
from dataclasses import replace

import numpy as np
import pytest

from coati_rl.algorithms.rounding import RoundingSums
from coati_rl.checkpoint.untrained_rollouts import FinishedGroup
from coati_rl.coordinator.state_json import References, from_json, to_json
from coati_rl.work import ProbeWork, SyncWork

SYNC = SyncWork(index=3, policy_version=2, members=(0, 1), probe=(1, 2))
VALUES = {
    "plain": [None, True, 3, 0.1, float("inf"), "ü"],
    "numbered": {1: (2, 3), 4: {5, 6}},
    "counts": Counter(a=2),
    "recent": deque([RoundingSums(1.0, 2.0, 3.0, 4.0)]),
    "work": SYNC,
    "probe": ProbeWork(policy_version=2, producer=1, probe=(1, 2), routes=None),
    "logprobs": np.array([-0.5, -1.25], dtype=np.float32),
    "numpy": [np.float64(0.5), np.int64(7)],
}


def test_values_come_back_with_their_types():
    groups = {}
    back = from_json(json.loads(json.dumps(to_json(VALUES, groups))), References(prompt_of=None, group_of=None))
    assert groups == {} and back["logprobs"].dtype == np.float32
    np.testing.assert_array_equal(back.pop("logprobs"), VALUES["logprobs"])
    assert back == {name: value for name, value in VALUES.items() if name != "logprobs"}
    assert {name: type(value) for name, value in back.items()} == {name: type(VALUES[name]) for name in back}


def test_groups_and_prompts_are_named_and_found(group_of):
    group, groups = group_of([(1.0, 2)], uid="train-3.0"), {}
    described = to_json([FinishedGroup(group=group, sync_index=1), group.prompt], groups)
    assert "token_ids" not in json.dumps(described) and groups == {"train-3.0": group}
    references = References(prompt_of={"train-3.0": "prompt"}.__getitem__, group_of=groups.__getitem__)
    finished, prompt = from_json(described, references)
    assert finished.group is group and (finished.sync_index, prompt) == (1, "prompt")


def test_other_types_are_refused_both_ways():
    with pytest.raises(TypeError, match="PosixPath has no form in the ledger"):
        to_json([__import__("pathlib").Path("a")], {})
    references = References(prompt_of=None, group_of=None)
    for bad in ({"Popen": ["ls"]}, {"SyncWork": [1]}, {"a": 1, "b": 2}):
        with pytest.raises((KeyError, ValueError)):
            from_json(bad, references)


def test_a_field_that_a_dataclass_gets_later_is_not_guessed():
    described = to_json(replace(SYNC, probe=()), {})
    described["SyncWork"].append(0)
    with pytest.raises(ValueError, match=r"longer|shorter"):
        from_json(described, References(prompt_of=None, group_of=None))
