"""Hold the base models that a server serves, each with the part that trains and the one that samples."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coati_rl.tinker.api_error import ApiError
from coati_rl.tinker.core import SamplingCore, TrainingCore
from coati_rl.tinker.scheduler import Scheduler


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """Describe a base model, and compute with it."""

    name: str  # that clients use
    directory: Path  # of its files, among them the tokenizer's
    arch: str  # transformers' model type
    training: TrainingCore
    sampling: SamplingCore


class Bases:
    """Find base models by name; each has a scheduler of its own."""

    def __init__(self, bases: Mapping[str, Base], *, batch_tokens: int) -> None:
        self.by_name = bases
        self._schedulers = {name: Scheduler(base.training, batch_tokens=batch_tokens) for name, base in bases.items()}

    def find(self, name: str) -> Base:
        """Return a base model. Raises: ApiError of status 404."""
        if name not in self.by_name:
            raise ApiError(404, f"base_model {name[:200]!r} is not served here; use {', '.join(self.by_name)}")
        return self.by_name[name]

    def scheduler(self, name: str) -> Scheduler:
        """Return who runs the training jobs of a base model."""
        return self._schedulers[name]

    async def close(self) -> None:
        """End all parts."""
        for base in self.by_name.values():
            await base.sampling.close()
        for scheduler in self._schedulers.values():
            scheduler.close()
