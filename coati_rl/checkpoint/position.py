"""Describe where a run stands between two optimizer steps: all that the coordinator has to remember for a run to be
resumed with no prompt lost and none trained twice. Goes into a checkpoint's state.json under "data".

A prompt is known by its uid and by its place in the order of draws, which seed and dataset decide. Finished rollouts
are kept beside (`coati_rl.checkpoint.kept_rollouts`); what is still sampled then is sampled again, with the weights of
the checkpoint.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from coati_rl.data.draw_order import DrawOrder


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """The defaults are the beginning of a run."""

    step: int = 0  # optimizer steps taken; also the version of the weights
    num_drawn: int = 0  # prompts taken from the dataset, over all episodes
    waiting: tuple[str, ...] = ()  # uids of those that are to be sampled, once more or for the first time
    kept: tuple[str, ...] = ()  # uids of those whose rollouts are finished and not trained
    last_evaluated: int = -1  # step of the last complete evaluation
    groups_filtered: int = 0  # dropped since the last step: these count towards the next one's record
    samples_failed: int = 0  # of those groups
    time_s: float = 0.0  # the run's age


def data_state(position: Position, order: DrawOrder) -> dict[str, Any]:
    """Both as JSON."""
    uids = {"waiting": list(position.waiting), "kept": list(position.kept)}
    return {"position": {**asdict(position), **uids}, "draw_order": asdict(order)}


def read_data_state(state: Mapping[str, Any]) -> tuple[Position, DrawOrder]:
    """The inverse of `data_state`, for the newest format. Raises: ValueError naming what is missing or unknown."""
    values = {}
    for name, kind in (("position", Position), ("draw_order", DrawOrder)):
        given, wanted = set(state.get(name, {})), {field.name for field in fields(kind)}
        if given != wanted:
            raise ValueError(f"{name} has other fields than this version's: {', '.join(sorted(given ^ wanted))}")
        values[name] = dict(state[name])
    uids = {name: tuple(values["position"][name]) for name in ("waiting", "kept")}
    position = Position(**{**values["position"], **uids})
    return position, DrawOrder(**values["draw_order"])
