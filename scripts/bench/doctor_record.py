"""Copy what the doctor reads of a tiny run into a small directory, without paths of this machine, for tests/data.

python scripts/bench/doctor_record.py runs/doctor/truncation-0 tests/data/doctor_runs/truncation
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

ROLLOUTS, SPANS = 20, 40  # lines of each file; of rollouts evenly spaced ones
LEFT_OUT = ("prompt_token_ids", "token_ids", "token_versions", "turns", "weights")  # that no rule reads
DIGITS = 4


def rounded(value: Any) -> Any:
    """Return a JSON value whose floats have some digits only."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return value


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file."""
    yield from (json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line)


def copy(source: Path, target: Path, kept: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = list) -> None:
    """Copy lines, with numbers rounded."""
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        lines = kept([*lines_of(source)])
        records = ({key: rounded(value) for key, value in each.items()} for each in lines)
        target.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def spread(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return some of the rollouts, without what is not read."""
    chosen = lines[:: max(1, len(lines) // ROLLOUTS)]
    return [{key: value for key, value in each.items() if key not in LEFT_OUT} for each in chosen]


def measured(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return records without what could not be computed."""
    return [{key: value for key, value in each.items() if value is not None} for each in lines]


def spans(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first spans of what was generated and scored, and the last line."""
    wanted = (each for each in lines if each["name"] in ("generate", "score", "train"))
    return [*islice(wanted, SPANS), lines[-1]]


def main(source: Path, target: Path) -> None:
    """Copy a run."""
    copy(source / "metrics.jsonl", target / "metrics.jsonl", measured)
    copy(source / "syncs.jsonl", target / "syncs.jsonl")
    copy(source / "eval" / "summary.jsonl", target / "eval" / "summary.jsonl")
    for path in (source / "rollouts").glob("*.jsonl"):
        copy(path, target / "rollouts" / path.name, spread)
    for path in (source / "timeline").glob("*-*.jsonl"):
        copy(path, target / "timeline" / path.name, spans)
    config = yaml.safe_load((source / "config.yaml").read_text(encoding="utf-8"))
    for name, value in config.items():
        if isinstance(value, str) and value.startswith("/"):
            config[name] = Path(value).name
    config["eval_dataset"] = {name: Path(path).name for name, path in (config.get("eval_dataset") or {}).items()}
    (target / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    (target / "logs").mkdir(exist_ok=True)
    log = (source / "logs" / "driver.log").read_text(encoding="utf-8")
    (target / "logs" / "driver.log").write_text(re.sub(r"/\S+/", "", log), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
