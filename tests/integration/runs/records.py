"""Read the records of a run directory, and check what must hold in every run."""

import json

from tests.integration.runs.conftest import Run
from tests.metric_names import ROLLOUT_RUN

GAP_LIMIT = 1e-4  # nats, mean over a step's tokens, float32


def lines(path):
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def read_rollouts(run: Run) -> list[dict]:
    """All samples that were recorded, in order."""
    return [line for path in sorted((run.run_dir / "rollouts").glob("*.jsonl")) for line in lines(path)]


def trained_samples(run: Run, steps) -> list[tuple]:
    """(prompt, number of the sample) of all that were trained in these steps."""
    return [
        (line["uid"], line["sample"]) for line in read_rollouts(run) if line["is_trained"] and line["step"] in steps
    ]


def assert_complete(run: Run, *, steps: int | None = None) -> list[dict]:
    """Exit 0, every step recorded with every key, and an HF checkpoint at the end. Returns: the records."""
    assert run.wait() == 0, run.text()
    records = run.records()
    assert [record["step"] for record in records] == list(range(1, (steps or len(records)) + 1))
    assert all(set(record) >= ROLLOUT_RUN for record in records)
    assert (run.run_dir / "checkpoints" / f"step-{len(records)}" / "manifest.json").is_file()
    return records


def assert_weights_moved(records: list[dict]) -> None:
    assert any(record["grad_norm"] > 0 for record in records), "else the gap proves nothing"


def assert_engine_and_trainer_agree(records: list[dict]) -> None:
    """After every weight sync the engine's log-probabilities are the trainer's."""
    assert all(record["sync_s"] > 0 for record in records[1:]), "K = 1: a sync before every step but the first"
    assert all(record["staleness_max"] == 0 for record in records)
    assert all(record["logprob_gap_mean"] < GAP_LIMIT for record in records)
    assert_weights_moved(records)
