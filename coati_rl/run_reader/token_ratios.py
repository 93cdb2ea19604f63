"""Read the ratios of a step's tokens, where a replay has written them; see `coati_rl.replay.token_ratios`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from coati_rl.observability.step_files import TOKEN_RATIOS
from coati_rl.run_reader.json_lines import read_json_lines

Ratios = Mapping[tuple[str, int], Sequence[float | None]]  # by uid and sample, one for each of its token_ids


def ratios_file(run_dir: Path, step: int) -> Path:
    """Return the file of an optimizer step, from 1."""
    return run_dir / TOKEN_RATIOS / f"step-{step}.jsonl"


def read_ratios(run_dir: Path, step: int) -> Ratios:
    """Return the ratios of a step's trajectories; none if they were not written. Raises: ConfigError."""
    lines = read_json_lines(ratios_file(run_dir, step))
    return {(str(line["uid"]), int(line["sample"])): line["ratios"] for line in lines if "ratios" in line}
