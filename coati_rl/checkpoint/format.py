"""Read the checkpoint formats of earlier versions: migrations bring what they wrote into today's form.

What a checkpoint says besides tensors is state.json and rollouts.npz. Both carry "format_version"; without it the
version is 1. To change the form of either: append a migration from the version before, which raises FORMAT_VERSION by
one, with a test and the checkpoint of the version before as its fixture. All other code knows the newest form only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from coati_rl.run_lengths import encode_runs

VERSION_KEY = "format_version"
Change = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Migration:
    """The two halves of the way from a version to the next; pure functions."""

    state: Change  # of state.json's object
    rollouts: Change  # of rollouts.npz: the arrays by name, "description" as its object


def _state_of_version_2(state: dict[str, Any]) -> dict[str, Any]:
    """Add what the first checkpoints lack.

    The oldest ones list finished prompts among the waiting ones and keep no rollouts; they have no digest of ground
    truths either, and an empty one stands for that.
    """
    data = state.get("data")
    if not (isinstance(data, dict) and {"position", "draw_order"} <= set(data)):
        return state
    position, draw_order = {"kept": [], **data["position"]}, {"ground_truths": "", **data["draw_order"]}
    return {**state, "data": {**data, "position": position, "draw_order": draw_order}}


def _rollouts_of_version_2(rollouts: dict[str, Any]) -> dict[str, Any]:
    """Make a trajectory of each response: one turn after the whole prompt, all of it in the loss."""
    description = rollouts["description"]
    lengths = [[response["num_tokens"] for response in group["responses"]] for group in description["groups"]]
    bounds = pairwise(accumulate((sum(numbers) for numbers in lengths), initial=0))
    groups = []
    for group, numbers, (start, end) in zip(description["groups"], lengths, bounds, strict=True):
        groups.append(
            {
                "uid": group["uid"],
                "producer_id": group["producer_id"],
                "temperature": group["temperature"],
                "loss_mask": [[True, end - start]],
                "policy_versions": encode_runs(rollouts["policy_versions"][start:end]),
                "temperatures": [[group["temperature"], end - start]],
                "trajectories": [
                    {
                        "episode": number,
                        "parent": None,
                        "num_shared": None,
                        "num_tokens": num_tokens,
                        "turns": [[0, 0, num_tokens, response["finish_reason"]]],
                        "rewards": [],
                        "text": response["text"],
                    }
                    for number, (num_tokens, response) in enumerate(zip(numbers, group["responses"], strict=True))
                ],
                "scores": [response["score"] for response in group["responses"]],
            }
        )
    arrays = {name: rollouts[name] for name in ("token_ids", "logprobs")}
    return {**arrays, "description": {**description, "groups": groups}}


MIGRATIONS = (Migration(state=_state_of_version_2, rollouts=_rollouts_of_version_2),)  # from version 1, 2, ...
FORMAT_VERSION = len(MIGRATIONS) + 1


def migrate_state(state: dict[str, Any]) -> dict[str, Any]:
    """state.json of any version in the newest form, without the version.

    Raises: ValueError if it is of a version that is not known here.
    """
    for migration in _since(state):
        state = migration.state(state)
    return {name: value for name, value in state.items() if name != VERSION_KEY}


def migrate_rollouts(rollouts: dict[str, Any]) -> dict[str, Any]:
    """rollouts.npz of any version in the newest form: the arrays by name, "description" as its object.

    Raises: ValueError if it is of a version that is not known here; whatever an archive without the keys of its version
        leads to.
    """
    for migration in _since(rollouts["description"]):
        rollouts = migration.rollouts(rollouts)
    return rollouts


def _since(written: dict[str, Any]) -> tuple[Migration, ...]:
    """The migrations from the version that something was written in."""
    version = written.get(VERSION_KEY, 1)
    if not isinstance(version, int) or not 1 <= version <= FORMAT_VERSION:
        raise ValueError(
            f"its format has version {version!r}, and this version of the project reads 1 to {FORMAT_VERSION}: "
            "use the version that wrote it or a later one"
        )
    return MIGRATIONS[version - 1 :]
