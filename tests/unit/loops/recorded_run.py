"""Replay the steps of runs in threads, whose files a test may have changed."""

import dataclasses
import json
import shutil

from coati.replay import parts
from coati_rl.observability.sinks import METRICS
from coati_rl.replay.replay import Replay
from coati_rl.replay.stage import first_difference
from coati_rl.run_reader.run_directory import RunDirectory
from tests.unit.loops.harness import score_of
from tests.unit.loops.watched_engine import InlineReward


def write_metrics(trace):
    """Write what the driver of a real run writes."""
    return write_steps(trace.paths.run_dir, trace.steps)


def write_steps(run_dir, steps):
    lines = [json.dumps({key: value for key, value in step.items() if key != "event"}) for step in steps]
    (run_dir / METRICS).write_text("".join(line + "\n" for line in lines))
    return run_dir


def replay_of(run_dir, *, has_workers=False):
    """`has_workers`: scores are computed in processes, as the command does."""
    own = parts() if has_workers else dataclasses.replace(parts(), open_scorer=_score_here)
    return Replay(RunDirectory(run_dir), own)


def _score_here(config):
    return InlineReward({name: score_of(settings) for name, settings in config.by_task.items()})


def first_named(run_dir, step):
    """The first stage that differs, and what is said of it; ("", "") if none does."""
    stage = first_difference([*replay_of(run_dir).stages(step)])
    return ("", "") if stage is None else (stage.name, stage.text)


def copy_of(run_dir, to):
    shutil.copytree(run_dir, to)
    return to


def change_lines(run_dir, change):
    """Let `change` have the dictionaries of all lines of the rollouts, and write them again."""
    (path,) = (run_dir / "rollouts").iterdir()
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
