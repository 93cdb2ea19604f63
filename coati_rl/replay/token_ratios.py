"""Write the ratio of each token of a step, of the policy that was updated to the one that the loss compares it with.

The report colours tokens by them (docs/report.md). A run does not record them: its loss holds the log-probabilities of
a chunk of tokens at a time, on the device, and does not know which rollouts they are of. A line of the file
<run-dir>/token_ratios/step-N.jsonl is a trajectory: uid, sample, and ratios, one for each of its token_ids, null where
the loss has none.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from coati_rl.disk import disk_errors
from coati_rl.replay.forward import token_scores
from coati_rl.replay.recorded_groups import groups_of
from coati_rl.replay.training import RecomputedTraining, StepBatch
from coati_rl.run_reader.rollout import RecordedRollout
from coati_rl.run_reader.token_ratios import ratios_file
from coati_rl.types import Trajectory

_DIGITS = 6
Content = tuple[bytes, bytes]  # of a sample: its tokens, and the log-probabilities that they were sampled with


def write_ratios(
    run_dir: Path, step: int, rollouts: Iterable[RecordedRollout], ratios: dict[Content, np.ndarray]
) -> Path:
    """Write the ratios of a step's rollouts. Returns: the file. Raises: RunError if it cannot be written."""
    path = ratios_file(run_dir, step)
    partial = path.with_name(f".{path.name}.partial")
    with disk_errors(path):
        path.parent.mkdir(exist_ok=True)
        partial.write_text("".join(_lines([*rollouts], ratios)), encoding="utf-8")
        partial.replace(path)
    return path


def ratios_of(training: RecomputedTraining, batch: StepBatch) -> dict[Content, np.ndarray]:
    """Return float32[N], exp(log-probability now - old one), of the N tokens that the loss counts, by sample.

    Args:
        training: with the weights before the update.
        batch: the step's, with its targets: old log-probabilities are the trainers', where the run has those, else the
            engine's.
    """
    found: dict[Content, np.ndarray] = {}
    for micro_batch in batch.micro_batches:
        arrays = micro_batch.loss_arrays
        with torch.no_grad():
            logprobs = token_scores(training.models["policy"], micro_batch)[0].numpy()
        ratios = np.exp(logprobs - arrays.get("old_logprobs", arrays["rollout_logprobs"]))
        for row, mask in enumerate(arrays["loss_mask"]):
            length = int(micro_batch.segments[micro_batch.segments[:, 0] == row, 2].sum())
            ids = micro_batch.token_ids[row, :length]
            found[_content(ids, arrays["rollout_logprobs"][row][mask])] = ratios[row][mask]
    return found


def _lines(rollouts: list[RecordedRollout], ratios: dict[Content, np.ndarray]) -> Iterator[str]:
    trajectories = [each for group in groups_of(rollouts) for each in group.trajectories]
    for rollout, trajectory in zip(rollouts, trajectories, strict=True):
        found = ratios.get(_content(trajectory.token_ids, trajectory.logprobs))
        if found is not None:
            line = {"uid": rollout.uid, "sample": rollout.sample, "ratios": _spread(found, trajectory)}
            yield json.dumps(line) + "\n"


def _content(token_ids: np.ndarray, logprobs: np.ndarray) -> Content:
    return token_ids.astype(np.int64).tobytes(), logprobs.astype(np.float32).tobytes()


def _spread(ratios: np.ndarray, trajectory: Trajectory) -> list[float | None]:
    """Return a ratio for each token behind the prompt."""
    left = iter(ratios.tolist())
    mask = trajectory.loss_mask[trajectory.turns[0].start :]
    return [_rounded(next(left)) if is_counted else None for is_counted in mask.tolist()]


def _rounded(ratio: float) -> float | None:
    return float(f"{ratio:.{_DIGITS}g}") if np.isfinite(ratio) else None
