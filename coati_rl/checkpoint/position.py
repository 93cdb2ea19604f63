"""Describe a run's position in its data between two optimizer steps.

It holds what the coordinator needs to resume a run with no prompt lost and none trained twice, and is stored in a
checkpoint's state.json under "data". A prompt is identified by its uid and by its number in the draw order, which seed
and dataset decide. Finished rollouts are stored separately (`coati_rl.checkpoint.untrained_rollouts`); prompts that are
being sampled are sampled again, with the weights of the checkpoint.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from coati_rl.reading.draw_order import DrawOrder


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Hold a run's position; the defaults are the beginning of a run."""

    step: int = 0  # optimizer steps taken; also the policy version
    num_drawn: int = 0  # prompts drawn from the dataset, over all episodes
    waiting: tuple[str, ...] = ()  # uids of drawn prompts that are to be sampled, again or for the first time
    kept: tuple[str, ...] = ()  # uids of prompts whose rollouts are finished and not trained
    last_evaluated: int = -1  # step of the last complete evaluation
    groups_filtered: int = 0  # dropped since the last step; counted in the next step's record
    samples_failed: int = 0  # of those groups
    time_s: float = 0.0  # wall time of the run so far


def data_state(position: Position, order: DrawOrder) -> dict[str, Any]:
    """Return position and draw order as JSON."""
    uids = {"waiting": list(position.waiting), "kept": list(position.kept)}
    return {"position": {**asdict(position), **uids}, "draw_order": asdict(order)}


def read_data_state(state: Mapping[str, Any]) -> tuple[Position, DrawOrder]:
    """Parse `data_state` in the newest format. Raises: ValueError naming missing or unknown fields."""
    values = {}
    for name, kind in (("position", Position), ("draw_order", DrawOrder)):
        given, wanted = set(state.get(name, {})), {field.name for field in fields(kind)}
        if given != wanted:
            raise ValueError(f"{name} has other fields than this version's: {', '.join(sorted(given ^ wanted))}")
        values[name] = dict(state[name])
    uids = {name: tuple(values["position"][name]) for name in ("waiting", "kept")}
    position = Position(**{**values["position"], **uids})
    return position, DrawOrder(**values["draw_order"])
