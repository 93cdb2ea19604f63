"""Walk through rooms: an environment of several turns, each of which pays at once.

A turn shows the turns that are left, its factor and a room, `left 3 x1 amber`. Behind each of the room's doors A, B, C
and D are coins, always the same ones (`ROOMS`), which the policy has to find out; the turn pays them times its factor.
One door of each room has a key besides, which makes the next turn's factor 3 (`boost`) in place of 1. Rooms are drawn
at random, whatever door is taken, and some are richer than others. So a choice is worth its coins, and what the key
brings in the next turn; all else that a walk pays is noise for it. An answer that is no door pays nothing.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from producer.environments.episode import Action, EpisodeTask, Message

DOORS = "ABCD"
# Coins behind the doors, and the place of the door with the key.
ROOMS: dict[str, tuple[tuple[int, ...], int]] = {
    "amber": ((9, 6, 1, 4), 1),
    "black": ((0, 1, 0, 2), 2),
    "coral": ((3, 0, 8, 5), 0),
    "denim": ((1, 1, 3, 0), 3),
    "ebony": ((2, 9, 3, 7), 3),
    "green": ((2, 0, 1, 1), 1),
    "ivory": ((4, 7, 5, 0), 2),
    "lilac": ((0, 3, 2, 9), 1),
}
MOST_COINS = max(max(coins) for coins, _ in ROOMS.values())
FIRST_FACTOR = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """Hold what a turn shows."""

    num_left: int  # turns after this one
    factor: int
    room: str

    def __str__(self) -> str:
        """Return the text that the policy reads."""
        return f"left {self.num_left} x{self.factor} {self.room}"


Player = Callable[[View], int]  # the place of the door that is taken


class Rooms:
    """Play one walk.

    Args:
        num_turns: of the walk.
        boost: factor of the turn after one that took the key.
        dice: what the rooms after the first one depend on: `episode`, so that walks of one prompt have only their first
            room in common, or `prompt`, so that they meet the same rooms (factors are their own).
    """

    def __init__(self, num_turns: int = 5, boost: int = 3, dice: str = "episode") -> None:
        if dice not in ("episode", "prompt"):
            raise ValueError(f"dice is {dice!r}; use episode or prompt")
        self._num_turns, self._boost, self._dice = num_turns, boost, dice

    def reset(self, task: EpisodeTask) -> list[Message]:
        """Enter the first room, the same in all walks of a prompt."""
        self._seed = f"{task.seed}" if self._dice == "prompt" else f"{task.seed}/{task.episode}"
        self.view = self._draw(0, f"{task.seed}", factor=FIRST_FACTOR)
        return self._message()

    def step(self, action: Action) -> tuple[list[Message] | None, float, bool, dict[str, Any]]:
        """Pay for the door, and enter the next room."""
        view, door = self.view, DOORS.find(action.text) if len(action.text) == 1 else -1
        coins, key = ROOMS[view.room]
        reward = 0.0 if door < 0 else view.factor * coins[door] / (self._boost * MOST_COINS)
        info = {"room": view.room, "factor": view.factor, "key": door == key}
        if view.num_left == 0:
            return None, reward, True, info
        self.view = self._draw(action.turn + 1, self._seed, factor=self._boost if door == key else 1)
        return self._message(), reward, False, info

    def _draw(self, turn: int, seed: str, *, factor: int) -> View:
        room = random.Random(f"{seed}/{turn}").choice([*ROOMS])
        return View(num_left=self._num_turns - 1 - turn, factor=factor, room=room)

    def _message(self) -> list[Message]:
        return [{"role": "user", "content": str(self.view)}]


def most_coins(view: View) -> int:
    """Take the door that pays most now."""
    coins, _ = ROOMS[view.room]
    return coins.index(max(coins))


def keys(view: View) -> int:
    """Take the door with the key."""
    _, key = ROOMS[view.room]
    return key


def key_then_coins(view: View) -> int:
    """Take the key while the factor is 1, and the most coins where the factor is larger, and at the end."""
    return keys(view) if view.factor == 1 and view.num_left else most_coins(view)


def mean_reward(*, num_turns: int, boost: int, player: Player | None = None) -> float:
    """Return the expected reward of a walk, exactly. Without a player doors are drawn at random."""
    after = {1: 0.0, boost: 0.0}  # coins of the turns to come, by the next turn's factor
    for num_left in range(num_turns):
        after = {factor: _mean_coins(num_left, factor, boost, after, player) for factor in after}
    return after[FIRST_FACTOR] / (boost * MOST_COINS)


def best_reward(*, num_turns: int, boost: int) -> float:
    """Return the largest expected reward of a walk: of a player who knows what a key is worth in the next turn."""
    after = {1: 0.0, boost: 0.0}
    for num_left in range(num_turns):
        player = partial(_better, gain=after[boost] - after[1])
        after = {factor: _mean_coins(num_left, factor, boost, after, player) for factor in after}
    return after[FIRST_FACTOR] / (boost * MOST_COINS)


def best_reward_by_room(*, num_turns: int, boost: int) -> float:
    """Return the largest expected reward of a walk of a player who looks at nothing but the room."""
    most = {0: 0}  # coins of all rooms, by the number of rooms whose key is taken
    for coins, key in ROOMS.values():
        without_key = max(each for door, each in enumerate(coins) if door != key)
        found = dict[int, int]()
        for count, total in most.items():
            found[count] = max(found.get(count, 0), total + without_key)
            found[count + 1] = total + coins[key]
        most = found
    num_rooms = len(ROOMS)
    walks = (
        total / num_rooms * (FIRST_FACTOR + (num_turns - 1) * (1 + (boost - 1) * count / num_rooms))
        for count, total in most.items()
    )
    return max(walks) / (boost * MOST_COINS)


def _better(view: View, *, gain: float) -> int:
    coins, key = ROOMS[view.room]
    worth = [view.factor * each + gain * (door == key) for door, each in enumerate(coins)]
    return worth.index(max(worth))


def _mean_coins(num_left: int, factor: int, boost: int, after: dict[int, float], player: Player | None) -> float:
    """Return the expected coins of a turn and those after it, over all rooms."""
    total = 0.0
    for room, (coins, key) in ROOMS.items():
        doors = range(len(DOORS)) if player is None else (player(View(num_left=num_left, factor=factor, room=room)),)
        worth = [factor * coins[door] + after[boost if door == key else 1] for door in doors]
        total += sum(worth) / len(worth)
    return total / len(ROOMS)
