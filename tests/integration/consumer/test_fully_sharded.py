"""Test that FSDP2's shards of tensor-parallel parts, its copies, and experts shared out give a step's plain gradient.

The oracle is plain transformers on one sample at a time, as in test_gradients.py; counts are those of one process.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.consumer.conftest import FULLY_SHARDED, MAX_GRAD_NORM, NUM_STEPS, save_with_reference
from tests.integration.consumer.expert_models import CLIPPED, CUTS, EXPERTS
from tests.integration.consumer.gradient_matrix import MODELS, OTHER_MODELS, Run, Trial
from tests.integration.consumer.gradient_process import take_trials
from tests.integration.consumer.losses import Cut
from tests.integration.consumer.test_context_parallel import ALONE, FIRST, trials_of
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
PACKED = Trial(FIRST, "sequence", Cut(2, True, "uneven", shared=True))
FAST = {  # of two ranks each, in one launch
    Run("fsdp2_tp2", "fp32"): [PACKED],
    Run("fsdp2_copies2", "fp32"): [PACKED],
    Run("ep2", "fp32"): [Trial("qwen3_moe", CLIPPED, CUTS[-1])],
}
RUNS = [*(Run(layout, "fp32") for layout in FULLY_SHARDED), Run("fsdp2_tp2_dp2", "bf16")]
OF_EVERY_LOSS = (Run("fsdp2_tp2_dp2", "fp32"), Run("fsdp2_dp2_copies2", "fp32"))


@pytest.fixture(scope="module")
def model_root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    models = MODELS | OTHER_MODELS | {"qwen3_moe": EXPERTS["qwen3_moe"]}
    for name in models if request.config.getoption("--all") else (FIRST, "qwen3_moe"):
        architecture, settings = models[name]
        save_with_reference(root / name, architecture, **settings)
    return root


@pytest.fixture(scope="module")
def fast(trainers: TrainerServers, model_root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Trained]:
    out_dir = tmp_path_factory.mktemp("fast")
    trainers.launch_and_check(take_trials, out_dir, model_root, [*FAST.items()], world_size=2)
    return [Trained(model_root, run, trials, out_dir) for run, trials in FAST.items()]


@pytest.fixture(scope="module")
def trained(
    trainers: TrainerServers, model_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Run], Trained]:
    out_dir = tmp_path_factory.mktemp("gradients")

    @functools.cache
    def results(run: Run) -> Trained:
        chosen = trials_of(run, is_all=run in (*OF_EVERY_LOSS, ALONE))
        trials = [trial._replace(num_steps=NUM_STEPS) for trial in chosen]
        trainers.launch_and_check(take_trials, out_dir, model_root, [(run, trials)], world_size=run.world_size)
        return Trained(model_root, run, trials, out_dir)

    return results


def num_plain_steps(results: Trained, precision: str = "fp32") -> int:
    """Count the steps, all of which have plain transformers' gradient, norm and loss, with copies that stay equal."""
    num_steps = 0
    for trial, ranks, right in results:
        num_steps += NUM_STEPS
        for step in range(NUM_STEPS):
            gradients = results.joined(trial, step, "gradients")
            found = differences(gradients, right[step]["gradients"], right[step]["scales"])
            assert max(found.values()) < TOLERANCE[precision], (trial, step, found)
            for steps in ranks:
                assert steps[step]["norm"] == pytest.approx(norm_of(gradients), rel=NORM_TOLERANCE), (trial, step)
                assert steps[step]["norm"] > MAX_GRAD_NORM
                loss = steps[step]["sums"]["loss_sum"] * steps[step]["loss_scale"]
                assert loss == pytest.approx(right[step]["loss"], abs=LOSS_TOLERANCE[precision]), (trial, step)
        seen: dict[object, str] = {}
        for steps in ranks:
            for place, digest in steps[-1]["weights"].items():
                assert seen.setdefault(place, digest) == digest, (trial, place)
        assert len({steps[0]["norm"] for steps in ranks}) == 1
    return num_steps


def test_two_ranks_with_shards_copies_or_experts_take_the_plain_step(fast: list[Trained]) -> None:
    assert [num_plain_steps(results) for results in fast] == [NUM_STEPS * len(trials) for trials in FAST.values()]


@pytest.mark.full
@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_every_layout_takes_the_plain_step(trained: Callable[[Run], Trained], run: Run) -> None:
    assert num_plain_steps(trained(run), run.precision) >= NUM_STEPS


@pytest.mark.full
@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_every_count_and_sum_is_that_of_one_process(trained: Callable[[Run], Trained], run: Run) -> None:
    """None as many times as there are tensor-parallel ranks or copies."""
    alone = trained(Run(ALONE.layout, run.precision))
    expected = {(*trial, step): each[0][step]["sums"] for trial, each, _ in alone for step in range(NUM_STEPS)}
    for trial, ranks, _ in trained(run):
        for step in range(NUM_STEPS):
            sums = expected[*trial, step]
            counts = {name: value for name, value in sums.items() if "tokens" in name or "samples" in name}
            assert counts
            for steps in ranks:
                assert {name: steps[step]["sums"][name] for name in counts} == counts, (trial, step)
                if run.precision == "fp32":
                    assert steps[step]["sums"] == pytest.approx(sums, rel=1e-5, abs=1e-5), (trial, step)
