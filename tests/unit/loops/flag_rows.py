"""Describe rows of test_flags.py: a changed field, and what to look at in the traces of two runs."""

import json
from dataclasses import dataclass, field
from typing import Any

from coati_rl.batching.packing import build_mini_batch
from coati_rl.work import SyncWork, TrainWork


@dataclass(frozen=True)
class Row:
    """`see` is `was` in a run with the base, `now` after the change; without them it only has to differ."""

    value: Any
    see: Any
    was: Any = ...
    now: Any = ...
    base: dict = field(default_factory=dict)  # of both runs
    options: dict = field(default_factory=dict)  # of both runs' harness


def of_the_first_step(see):
    """Mark what needs no second step."""
    see.needs_one_step = True
    return see


def num_steps(trace):
    return len(trace.steps)


def sampled(trace):
    return trace.responses


def prompts(trace):
    return sorted(len(group.prompt.token_ids) for group in trace.groups)


@of_the_first_step
def first_words(trace):
    return {group.prompt.rendered.split()[0] for group in trace.groups}


def weights(trace):
    return {name: weight.tolist() for name, weight in trace.weights.items()}


@of_the_first_step
def first_gradient(trace):
    return {name: gradient.tolist() for name, gradient in trace.gradients[0].items()}


@of_the_first_step
def trained(trace):
    """Return the kinds of parameters that have a gradient."""
    kinds = {name.split(".")[-2] for name in trace.gradients[0]}
    return kinds if kinds <= {"lora_A", "lora_B"} else {"weight"}


def gradient_norm_after_clipping(trace):
    return round(max(sum(float(g.square().sum()) for g in step.values()) ** 0.5 for step in trace.gradients), 6)


def sampling(name):
    return lambda trace: {getattr(request.sampling, name) for request in trace.engines[0].requests}


def metric(name, *, step=0):
    see = lambda trace: trace.steps[step][name]  # noqa: E731
    return of_the_first_step(see) if step == 0 else see


def rates(trace):
    return [step["learning_rate"] for step in trace.steps]


def num_probed_syncs(trace):
    return sum(bool(work.probe) for work in trace.work if isinstance(work, SyncWork))


def num_micro_batches(trace):
    return [len(work.batch.plan) for work in trace.work if isinstance(work, TrainWork)]


def micro_batches(trace):
    batches = [build_mini_batch(work.batch) for work in trace.work if isinstance(work, TrainWork)]
    return [m for batch in batches for m in batch.micro_batches]


def micro_batch_tokens(trace):
    return [m.token_ids.size for m in micro_batches(trace)]


def micro_batch_rows(trace):
    return [len(m.token_ids) for m in micro_batches(trace)]


def kept_checkpoints(trace):
    return sorted(directory.name for directory in trace.paths.checkpoints.iterdir())


def num_events(kind):
    return lambda trace: len(trace.of(kind))


def directories(trace):
    """Return the directories named by flags that have been written to."""
    named = ("other", "run/checkpoints", "run/eval", "run/rollouts")
    found = (trace.paths.run_dir.parent / name for name in named)
    return [directory.name for directory in found if directory.is_dir() and any(directory.iterdir())]


@of_the_first_step
def first_rollout(trace):
    (path,) = trace.paths.rollouts.iterdir()
    return json.loads(path.read_text().splitlines()[0])


def evaluated(key):
    """Return what the sampling of the evaluation's leases has under a key."""
    return lambda trace: {getattr(lease.sampling, key) for lease in trace.leases if lease.prompt.purpose == "eval"}
