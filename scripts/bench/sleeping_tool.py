"""Provide episodes with a tool that sleeps, for agents.py; the processes of episodes import nothing else."""

import asyncio
import time
from typing import Any

OBSERVATION = [{"role": "user", "content": "The tool has slept. Call it again."}]


class Sleep:
    """Sleep in each turn."""

    def __init__(self, turns: int, sleep_s: float) -> None:
        self._turns = turns
        self._sleep_s = sleep_s

    def reset(self, task: Any) -> None:
        """Begin with the row's prompt."""

    def close(self) -> None:
        """Free nothing."""

    def step(self, action: Any) -> tuple[Any, ...]:
        """Sleep."""
        time.sleep(self._sleep_s)
        return OBSERVATION, 0.0, action.turn + 1 >= self._turns


class SleepAsync(Sleep):
    """Sleep in each turn, in an event loop."""

    async def step(self, action: Any) -> tuple[Any, ...]:  # type: ignore[override]
        """Sleep."""
        await asyncio.sleep(self._sleep_s)
        return OBSERVATION, 0.0, action.turn + 1 >= self._turns
