"""Describe a part of the coordinator's state as JSON, and read it back: types by name, prompts and groups by uid.

A value that JSON has not is an object of one key, which names its type. Only the types that are listed here can be
read, so that a file decides nothing but values. Groups are not in the JSON: the ledger has them.
"""

import base64
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from coati_rl.algorithms.rounding import RoundingSums
from coati_rl.checkpoint.position import Position
from coati_rl.checkpoint.untrained_rollouts import FinishedGroup, UntrainedRollouts
from coati_rl.coordinator.checkpoint_schedule import SaveNote
from coati_rl.coordinator.logprob_mismatch import LogprobMismatch
from coati_rl.coordinator.scheduler import TrainNote
from coati_rl.coordinator.step_plans import StepPlan
from coati_rl.types import CommitResult, Prompt, RolloutGroup
from coati_rl.work import CommitReport, FinishWork, HandOverWork, ProbeWork, RepeatWork, SyncReport, SyncWork

_DATACLASSES = {
    cls.__name__: cls
    for cls in (
        CommitReport,
        CommitResult,
        FinishedGroup,
        FinishWork,
        HandOverWork,
        LogprobMismatch,
        Position,
        ProbeWork,
        RepeatWork,
        RoundingSums,
        SaveNote,
        StepPlan,
        SyncReport,
        SyncWork,
        TrainNote,
        UntrainedRollouts,
    )
}
_PLAIN = frozenset((type(None), bool, int, float, str))
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "deque": deque}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {"dict": dict, "Counter": Counter}


@dataclass(frozen=True, kw_only=True, slots=True)
class References:
    """Find what is not in the JSON."""

    prompt_of: Callable[[str], Prompt]
    group_of: Callable[[str], RolloutGroup]


def to_json(value: Any, groups: dict[str, RolloutGroup]) -> Any:
    """Return a value as JSON; the groups that it names are added to `groups`, by uid.

    Raises: TypeError for a type that is not listed.
    """
    cls = type(value)
    if cls in _PLAIN:  # first, as most values are: the state is described several times a step
        return value
    if cls is RolloutGroup:
        groups[value.prompt.uid] = value
        return {"group": value.prompt.uid}
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return _list_to_json(value, groups)
    name = cls.__name__
    if name in _MAPPINGS:
        return {name: _pairs(value, groups)}
    if name in _SEQUENCES:
        return {name: [to_json(each, groups) for each in value]}
    if isinstance(value, np.ndarray):
        return {"array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, Prompt):
        return {"prompt": value.uid}
    if name in _DATACLASSES and is_dataclass(value):
        return {name: [to_json(getattr(value, field.name), groups) for field in fields(value)]}
    if isinstance(value, Mapping):
        return {"dict": _pairs(value, groups)}
    raise TypeError(f"{name} has no form in the ledger")


def _list_to_json(values: list[Any], groups: dict[str, RolloutGroup]) -> Any:
    if values and all(type(each) is RolloutGroup for each in values):  # a mini-batch
        groups.update((each.prompt.uid, each) for each in values)
        return {"groups": [each.prompt.uid for each in values]}
    return [to_json(each, groups) for each in values]


def _pairs(mapping: Mapping[Any, Any], groups: dict[str, RolloutGroup]) -> list[list[Any]]:
    return [[to_json(key, groups), to_json(each, groups)] for key, each in mapping.items()]


def from_json(value: Any, references: References) -> Any:
    """Return what `to_json` has described. Raises: KeyError or ValueError for anything else, or what is not there."""
    if isinstance(value, list):
        return [from_json(each, references) for each in value]
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    if name in _MAPPINGS:
        return _MAPPINGS[name]({from_json(key, references): from_json(each, references) for key, each in content})
    if name in _SEQUENCES:
        return _SEQUENCES[name](from_json(each, references) for each in content)
    if name == "array":
        dtype, shape, data = content
        return np.frombuffer(base64.b64decode(data), dtype=np.dtype(dtype)).reshape(shape)
    if name == "group":
        return references.group_of(content)
    if name == "groups":
        return [references.group_of(uid) for uid in content]
    if name == "prompt":
        return references.prompt_of(content)
    cls = _DATACLASSES[name]
    names = [field.name for field in fields(cls)]
    return cls(**dict(zip(names, [from_json(each, references) for each in content], strict=True)))
