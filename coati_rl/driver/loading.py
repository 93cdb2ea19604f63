"""Say what the actors of a run load, and when they have."""

import time
from collections.abc import Callable
from pathlib import Path

from coati_rl.config.training import TrainingConfig
from coati_rl.text import count

_GIB = 2**30


def model_and_size(config: TrainingConfig) -> str:
    """Return the policy's name and the size of its files: "Qwen3-0.6B, 1.11 GiB"; a name of the hub alone."""
    directory = Path(config.model.model)
    num_bytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    return f"{directory.name}, {num_bytes / _GIB:.3g} GiB" if num_bytes else config.model.model


class LoadingLines:
    """Write a line when all trainers, and one when all producers, have loaded the model."""

    def __init__(self, config: TrainingConfig, now: Callable[[], float] = time.monotonic) -> None:
        """Begin to count the seconds."""
        self._now, self._begin = now, now()
        self._model = model_and_size(config)
        self._num_trainers, self._num_producers = config.parallel.num_trainers, config.num_producers
        self._num_joined = 0

    def with_model(self, text: str) -> str:
        """Return what is said while actors load, with what they load."""
        return f"{text} ({self._model})"

    def trainers(self) -> str:
        """Return the line of the trainers."""
        return self._line("trainer", self._num_trainers)

    def producer_joined(self, producer_id: int) -> str | None:
        """Count a producer that has loaded its engine.

        Returns: a line for the last of the run's first ones, and for each that comes after them.
        """
        self._num_joined += 1
        if self._num_joined > self._num_producers:
            return f"producer {producer_id} has joined"
        return self._line("producer", self._num_producers) if self._num_joined == self._num_producers else None

    def _line(self, noun: str, number: int) -> str:
        seconds, have = self._now() - self._begin, "has" if number == 1 else "have"
        return f"{count(number, noun)} {have} loaded the model ({self._model}) in {seconds:.1f} s"
