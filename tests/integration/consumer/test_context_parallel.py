"""Test that ranks which share each row's tokens give a step's plain gradient, norm, loss and counts.

The oracle is plain transformers on one sample at a time, as in test_gradients.py. Rows are packed, padded and with
shared prefixes, some shorter than the chunks that ranks share out; most lengths do not divide.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.consumer.conftest import CONTEXT, MAX_GRAD_NORM, NUM_STEPS, save_with_reference
from tests.integration.consumer.gradient_matrix import CASES, MODELS, OTHER_MODELS, Run, Trial
from tests.integration.consumer.gradient_process import take_trials
from tests.integration.consumer.losses import ALL_CUTS, LOSSES, Cut
from tests.integration.consumer.test_gradients import (
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    TOLERANCE,
    Trained,
    differences,
    norm_of,
)
from tests.integration.consumer.trainer_server import LAUNCH_TIMEOUT_S, TrainerServers

pytestmark = pytest.mark.timeout(LAUNCH_TIMEOUT_S)
FAST = Run("cp2", "fp32")
RUNS = [FAST]
RUNS += [Run(layout, "bf16" if "zero" in layout else "fp32") for layout in CONTEXT if layout != "cp2"]
RUNS += [Run(layout, "bf16") for layout in ("cp2", "cp2_fsdp2_dp2")]
# Of one process, whose sums are those that context-parallel ranks must report.
ALONE = Run("dp1", "fp32")
FIRST, WINDOW = "qwen3-tied", "mistral"


def fast_trials() -> list[Trial]:
    """The clip with a penalty and a reference in each way of cutting, whole samples, skipped samples, pairs.

    The last way goes on to a second step.
    """
    cuts = [cut for cut in ALL_CUTS if cut.size == 4]
    clips = [Trial(WINDOW, next(iter(LOSSES)), cut, NUM_STEPS if cut == cuts[-1] else 1) for cut in cuts]
    others = [Trial(FIRST, loss, Cut(2, True, "uneven", shared=True), 1) for loss in ("sequence", "skip")]
    return [*clips, *others, Trial(FIRST, "dpo", CASES["dpo"].cuts[0], 1)]


def trials_of(run: Run, *, is_all: bool) -> list[Trial]:
    if not is_all:
        return fast_trials()
    losses = [Trial(FIRST, loss, cut) for loss in CASES for cut in CASES[loss].cuts[:3]]
    models = [*MODELS, *OTHER_MODELS] if run.precision == "fp32" else [*MODELS][1:2]
    clips = [Trial(model, next(iter(LOSSES)), cut) for model in models if model != FIRST for cut in ALL_CUTS]
    found = dict.fromkeys(trial._replace(num_steps=NUM_STEPS) for trial in (*fast_trials(), *losses, *clips))
    return sorted(found, key=lambda trial: [*MODELS, *OTHER_MODELS].index(trial.model))


def marked(run: Run) -> Any:
    return run if run == FAST else pytest.param(run, marks=pytest.mark.full)


@pytest.fixture(scope="module")
def model_root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    models = MODELS | OTHER_MODELS
    for name in models if request.config.getoption("--all") else (FIRST, WINDOW):
        architecture, settings = models[name]
        save_with_reference(root / name, architecture, **settings)
    return root


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest,
    trainers: TrainerServers,
    model_root: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Run], Trained]:
    out_dir = tmp_path_factory.mktemp("gradients")

    @functools.cache
    def results(run: Run) -> Trained:
        trials = trials_of(run, is_all=request.config.getoption("--all"))
        trainers.launch_and_check(take_trials, out_dir, model_root, [(run, trials)], world_size=run.world_size)
        return Trained(model_root, run, trials, out_dir)

    return results


@pytest.mark.parametrize("run", [marked(run) for run in RUNS], ids="-".join)
def test_ranks_that_share_rows_give_the_plain_gradient_norm_and_loss(
    trained: Callable[[Run], Trained], run: Run
) -> None:
    results = trained(run)
    last = max(rank["place"][1] for rank in results.ranks)
    for trial, ranks, right in results:
        for step in range(trial.num_steps):
            gradients = results.joined(trial, step, "gradients")
            found = differences(gradients, right[step]["gradients"], right[step]["scales"])
            assert max(found.values()) < TOLERANCE[run.precision], (trial, step, found)
            norm = norm_of(gradients)
            for rank, steps in zip(results.ranks, ranks, strict=True):
                assert steps[step]["norm"] == pytest.approx(norm, rel=NORM_TOLERANCE), (trial, step)
                assert steps[step]["norm"] > MAX_GRAD_NORM
                if rank["place"][1] == last:
                    loss = steps[step]["sums"]["loss_sum"] * steps[step]["loss_scale"]
                    assert loss == pytest.approx(right[step]["loss"], abs=LOSS_TOLERANCE[run.precision]), (trial, step)


@pytest.mark.parametrize("run", [marked(run) for run in RUNS if run.precision == "fp32"], ids="-".join)
def test_every_count_and_sum_is_reported_as_one_process_reports_it(trained: Callable[[Run], Trained], run: Run) -> None:
    """None as many times as there are ranks that share a row."""
    alone = {
        (*trial, step): ranks[0][step]["sums"] for trial, ranks, _ in trained(ALONE) for step in range(trial.num_steps)
    }
    results = trained(run)
    last = max(rank["place"][1] for rank in results.ranks)
    for trial, ranks, _ in results:
        for rank, steps in zip(results.ranks, ranks, strict=True):
            for step in range(trial.num_steps if rank["place"][1] == last else 0):
                expected = alone[*trial, step]
                assert steps[step]["sums"] == pytest.approx(expected, rel=1e-5, abs=1e-5), (trial, step)
                assert {name for name in expected if "tokens" in name}
