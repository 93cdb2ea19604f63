"""Have trainers of each number take the trials of their layouts, and read what they recorded."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.integration.consumer.conftest import EVERY_LAYOUT
from tests.integration.consumer.trainer_server import TrainerServers


def launched(
    trainers: TrainerServers, take: Callable[..., None], out_dir: Path, models: Path, trials: Sequence[Any]
) -> dict[Any, list[dict[str, Any]]]:
    """Return what each rank recorded of each trial, which has a layout and a name."""
    for size in (1, 2, 3, 4):
        chosen = [trial for trial in trials if EVERY_LAYOUT[trial.layout][0] == size]
        if chosen:
            trainers.launch_and_check(take, out_dir, models, chosen, world_size=size)
    return {
        trial: [torch.load(out_dir / f"{trial.name}-rank{rank}.pt") for rank in range(EVERY_LAYOUT[trial.layout][0])]
        for trial in trials
    }
