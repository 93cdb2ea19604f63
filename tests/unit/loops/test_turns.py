"""Test that a run whose producers and trainers take turns is the run that they have on devices of their own."""

import json

import pytest
import torch

from coati_rl.work import FinishWork, HandOverWork, SaveWork, SyncWork, TrainWork

TURNS = {"colocate": True, "n_behind": 0}


def turns_of(trace):
    """What the trainer did, one letter an item: p and t for hand-overs, s for a sync, . for a mini-batch, c, f."""
    letters = {SyncWork: "s", TrainWork: ".", SaveWork: "c", FinishWork: "f"}
    return "".join(work.to[0] if isinstance(work, HandOverWork) else letters[type(work)] for work in trace.work)


def rollouts_of(trace):
    paths = sorted((trace.paths.run_dir / "rollouts").glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_a_run_in_turns_has_the_weights_rollouts_and_metrics_of_one_on_separate_devices(run_in_threads):
    apart = run_in_threads({"n_behind": 0}, hold_trainer=True)
    in_turns = run_in_threads(TURNS)
    assert apart.weights.keys() == in_turns.weights.keys()
    assert all(torch.equal(apart.weights[name], in_turns.weights[name]) for name in apart.weights)
    assert rollouts_of(apart) == rollouts_of(in_turns) != []
    print(turns_of(in_turns))
