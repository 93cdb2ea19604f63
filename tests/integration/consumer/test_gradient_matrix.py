"""Test that the fast selection of gradient tests covers all losses, layouts, models and splits pairwise."""

import itertools
from typing import Any

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.build import build_loss
from coati_rl.config import Config
from coati_rl.config.presets import PRESETS
from tests.integration.consumer.conftest import LAYOUTS, NUM_STEPS
from tests.integration.consumer.gradient_matrix import (
    ALONE,
    CUT,
    FOUR,
    MODELS,
    OTHER_MODELS,
    PRECISIONS,
    RUNS,
    SHARDED,
    WAYS,
    WITH_OTHER_MODELS,
    WITH_PREFERENCE,
    Run,
    Trial,
    is_full,
    pairwise_trials,
    preference_trials,
    trials_of,
    whole_product,
)
from tests.integration.consumer.losses import CUT_SIZES, CUT_SPLITS, LOSSES
from tests.integration.consumer.preference_losses import PREFERENCES

CUT_AXES: dict[str, tuple[Any, ...]] = {
    "size": CUT_SIZES,
    "packed": (True, False),
    "split": CUT_SPLITS,
    "shared": (True, False),
}
TRIALS = [(run, trial) for run in RUNS for trial in trials_of(run, is_all=False)]
FIRST_LOSS = next(iter(LOSSES))


def axes_of(run: Run, trial: Trial) -> dict[str, Any]:
    """Of a trial on one of MODELS."""
    world_size, settings = LAYOUTS[run.layout]
    architecture, model = MODELS[trial.model]
    tp_size, pp_size = settings.get("tp_size", 1), settings.get("pp_size", 1)
    return {
        **trial.cut._asdict(),
        "precision": run.precision,
        "architecture": architecture,
        "tied": model["tied"],
        "tp_size": tp_size,
        "pp_size": pp_size,
        "dp_size": world_size // (tp_size * pp_size),
        "zero_stage": 3 if settings.get("plugin") == "fsdp2" else settings.get("zero_stage", 0),
    }


VALUES = CUT_AXES | {
    "precision": PRECISIONS,
    "architecture": ("qwen3", "qwen2"),
    "tied": (True, False),
    "tp_size": (1, 2),
    "pp_size": (1, 2),
    "dp_size": (1, 2),
    "zero_stage": (0, 1, 2, 3),
}


def test_the_loss_of_every_preset_is_made_of_what_rows_have() -> None:
    """REMAX's is RLOO's and OPO's; their advantages, from rewards on: unit/algorithms/test_whole_presets.py."""
    rows = [(row, row.loss) for row in LOSSES.values() if isinstance(row.loss, PolicyLoss)]
    forms = {(loss.policy_loss, loss.ratio_level) for _, loss in rows}
    estimators = {loss.kl_estimator for _, loss in rows if loss.kl_coeff}
    for algo in PRESETS:
        algorithm = Config(algo=algo).algorithm
        loss = build_loss(algorithm)
        assert (loss.policy_loss, loss.ratio_level) in forms, algo
        assert not loss.kl_coeff or loss.kl_estimator in estimators, algo
        assert algorithm.loss_variation in {row.aggregation for row, _ in rows}, algo


def test_every_loss_is_in_dp1_and_in_one_of_the_layouts_that_stand_for_the_others() -> None:
    assert [run.layout for run in (ALONE, *CUT, SHARDED)] == ["dp1", "tp2", "pp2", "zero2_dp2"]
    met = {run: {trial.loss for trial in trials_of(run, is_all=False)} & {*LOSSES} for run in (ALONE, *CUT, SHARDED)}
    assert met[ALONE] == {*LOSSES}
    others = [loss for run in (*CUT, SHARDED) for loss in met[run] - {FIRST_LOSS}]
    assert sorted(others) == sorted({*LOSSES} - {FIRST_LOSS})


def test_losses_meet_every_value_of_every_axis_next_to_the_first() -> None:
    met = [axes_of(run, trial) for run, trial in TRIALS if trial.loss != FIRST_LOSS and trial.model in MODELS]
    for axis, values in VALUES.items():
        assert {axes[axis] for axes in met} == {*values} - ({1} if axis == "zero_stage" else set()), axis


def test_every_objective_on_units_is_in_dp1_and_in_another_layout_and_with_all_in_every_one() -> None:
    for loss in PREFERENCES:
        met = {run for run, trial in TRIALS if trial.loss == loss}
        assert met == {ALONE, WITH_PREFERENCE[loss]}
        assert {run for run in RUNS if loss in {trial.loss for trial in whole_product(run)}} == {*RUNS}
    cuts = [trial.cut for _, trial in TRIALS if trial.loss in PREFERENCES]
    for axis, values in CUT_AXES.items():
        assert {getattr(cut, axis) for cut in cuts} == {*values}, axis


def test_every_layout_has_the_clip_with_every_kind_of_cut_two_steps_and_with_all_in_every_precision() -> None:
    assert {(run.layout, run.precision) for run in RUNS} == {
        *itertools.product(LAYOUTS, ["bf16"]),
        *((layout, "fp32") for layout in LAYOUTS if "zero" not in layout),
    }
    fast = [run for run in RUNS if not is_full(run)]
    assert {run.layout for run in fast} == {*LAYOUTS} - {"pp2_dp2", "tp2_zero1_dp2", "zero1_dp2"}
    assert {run for run in RUNS if trials_of(run, is_all=False)} == {*fast}
    for run in fast:
        trials = [trial for trial in trials_of(run, is_all=False) if trial.loss == FIRST_LOSS]
        assert max(trial.num_steps for trial in trials) == NUM_STEPS
        found = [MODELS[trial.model] for trial in trials if trial.model in MODELS]
        if run.world_size < 4:
            assert {architecture for architecture, _ in found} == {"qwen3", "qwen2"}
            assert {settings["tied"] for _, settings in found} == {True, False}
        assert {trial.model for trial in trials} >= {*FOUR.get(run, [])}
        for axis, values in CUT_AXES.items():
            assert {getattr(trial.cut, axis) for trial in trials} == {*values}, (run, axis)
    ways = {(t.cut.size, t.cut.packed, t.cut.shared) for _, t in TRIALS if t.loss == FIRST_LOSS and t.model in MODELS}
    assert ways == {*itertools.chain(*WAYS)}


def test_any_two_axes_meet_in_all_their_values() -> None:
    met = [axes_of(run, trial) for run, trial in TRIALS if trial.model in MODELS]
    impossible = {("precision", "fp32", "zero_stage", 1), ("precision", "fp32", "zero_stage", 2)}
    impossible |= {("pp_size", 2, "zero_stage", 2), ("dp_size", 1, "zero_stage", 2)}  # refused; without a peer
    impossible |= {(axis, value, "zero_stage", 3) for axis, value in (("tp_size", 2), ("pp_size", 2), ("dp_size", 1))}
    impossible |= {("packed", False, "shared", True)}
    # Only with --all: the second stage stands for the first, ZeRO for FSDP2, whose steps in bfloat16 lifecycles have.
    impossible |= {("tp_size", 2, "zero_stage", 1), ("precision", "bf16", "zero_stage", 3)}
    for left, right in itertools.combinations(VALUES, 2):
        pairs = {(left, axes[left], right, axes[right]) for axes in met}
        possible = {(left, a, right, b) for a in VALUES[left] for b in VALUES[right]} - impossible
        assert possible <= pairs, possible - pairs


def test_other_architectures_are_in_stages_of_uneven_length_and_meet_every_kind_of_cut() -> None:
    for run in (WITH_OTHER_MODELS, ALONE):
        assert {trial.model for trial in trials_of(run, is_all=False)} >= {*OTHER_MODELS}
    trials = [trial for _, trial in TRIALS if trial.model in OTHER_MODELS]
    for axis, values in CUT_AXES.items():
        assert {getattr(trial.cut, axis) for trial in trials} == {*values}, axis


def test_all_is_the_whole_product_and_the_fast_choice_about_a_tenth_of_it() -> None:
    for run in RUNS:
        every = (*whole_product(run), *pairwise_trials(run), *preference_trials(run))
        assert {*trials_of(run, is_all=True)} == {trial._replace(num_steps=NUM_STEPS) for trial in every}
    assert sum(len(whole_product(run)) for run in RUNS) == 1112 + len(PREFERENCES) * len(RUNS)
    assert len(TRIALS) <= 110
