"""Choose the combinations of losses, splits, models and layouts: pairwise, or all with `--all`.

A run is a layout in a precision. The fast choice has every loss on one process in float32, and in one of three other
runs: two that cut the model, and one that shares its gradient out in bfloat16. In all its runs it has the first loss,
which has a clip and a penalty, with every way of cutting its samples, and one of these goes on to a second step.
test_gradient_matrix.py says what meets what.
"""

import itertools
from typing import Any, NamedTuple

from tests.integration.consumer.conftest import EVERY_LAYOUT, LAYOUTS, NUM_STEPS
from tests.integration.consumer.losses import CUT_SPLITS, LOSSES, Cut, LossCase
from tests.integration.consumer.preference_losses import PREFERENCES, UnitCase

MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # architecture, and what `save_model` is told
    "qwen3-tied": ("qwen3", {"tied": True}),
    "qwen2-untied": ("qwen2", {"tied": False}),
    "qwen3-untied": ("qwen3", {"tied": False}),
    "qwen2-tied": ("qwen2", {"tied": True}),
}
# Stages of one layer and of two; biases in all projections; attention to the last five tokens.
OTHER_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tied": False, "num_hidden_layers": 3, "attention_bias": True}),
    "mistral": ("mistral", {"tied": True, "num_hidden_layers": 3, "sliding_window": 5}),
}
PRECISIONS = ("fp32", "bf16")
# What else can be combined of the others; the whole product has the first model alone there.
COMBINED = ("pp2_zero1_dp2", "tp2_zero2_dp2", "pp2_dp2", "zero1_dp1")
CLIPPED = ("clip", "clip, whole")
# Size, packed, shared: one sample is the same in a row. In each line are all values.
WAYS = (
    ((1, True, True), (2, True, False), (4, False, False)),
    ((2, True, True), (4, True, False), (1, False, False)),
    ((4, True, True), (2, False, False), (1, False, False)),
)


class Run(NamedTuple):
    layout: str
    precision: str

    @property
    def world_size(self) -> int:
        return EVERY_LAYOUT[self.layout][0]


class Trial(NamedTuple):
    """Optimizer steps from a model."""

    model: str
    loss: str
    cut: Cut
    num_steps: int = NUM_STEPS


# ZeRO shares out float32 masters of bfloat16 weights; there is no such thing in float32.
RUNS = [Run(*run) for run in itertools.product(LAYOUTS, PRECISIONS) if not ("zero" in run[0] and run[1] == "fp32")]
ALONE, CUT, SHARDED = Run("dp1", "fp32"), (Run("tp2", "fp32"), Run("pp2", "fp32")), Run("zero2_dp2", "bf16")
WITH_OTHER_MODELS = Run("tp2_pp2", "fp32")
# Of the runs of four processes those of the fast choice, and their models, each of which is built four times.
FOUR = {
    WITH_OTHER_MODELS: ["qwen3-tied", *OTHER_MODELS],
    Run("tp2_zero2_dp2", "bf16"): ["qwen3-untied"],
    Run("pp2_zero1_dp2", "bf16"): ["qwen2-tied"],
}
# ZeRO is in bfloat16 alone, and with it that of layouts that cut the model.
OF_ONE_OR_TWO = (
    *(ALONE, Run("dp1", "bf16"), Run("zero1_dp1", "bf16")),
    *(*CUT, SHARDED, Run("dp2", "fp32"), Run("fsdp2_dp2", "fp32")),
)
CASES: dict[str, LossCase | UnitCase] = {**LOSSES, **PREFERENCES}
# Besides dp1: each where what is special of it could go wrong, and together in every kind of layout.
WITH_PREFERENCE = {
    "dpo": Run("tp2", "fp32"),
    "cdpo, nll": Run("zero2_dp2", "bf16"),
    "robust dpo": Run("tp2", "fp32"),
    "ipo": Run("pp2", "fp32"),
    "simpo": Run("pp2", "fp32"),
    "orpo": Run("fsdp2_dp2", "fp32"),
    "kto": Run("dp2", "fp32"),
}


def is_full(run: Run) -> bool:
    """Return whether a run is left to --all."""
    return run not in (*OF_ONE_OR_TWO, *FOUR)


def trials_of(run: Run, *, is_all: bool) -> list[Trial]:
    """One model after another."""
    if is_full(run) and not is_all:
        return []
    trials = {*pairwise_trials(run), *preference_trials(run)}
    if is_all:
        trials = {trial._replace(num_steps=NUM_STEPS) for trial in (*trials, *whole_product(run))}
    return sorted(trials, key=lambda trial: [*MODELS, *OTHER_MODELS].index(trial.model))


def preference_trials(run: Run) -> list[Trial]:
    """Of the objectives on units that the fast choice has in this run."""
    chosen = [trial for trial in all_preference_trials(run) if run in (ALONE, WITH_PREFERENCE[trial.loss])]
    return [trial._replace(num_steps=1) for trial in chosen]


def all_preference_trials(run: Run) -> list[Trial]:
    """Each objective on units, with its cuts, on one of the models of the run."""
    models = [*MODELS] if run == ALONE else two_models_of(run)
    return [
        Trial(models[number % len(models)], loss, PREFERENCES[loss].cuts[RUNS.index(run) % len(PREFERENCES[loss].cuts)])
        for number, loss in enumerate(PREFERENCES)
    ]


def models_of(run: Run) -> list[str]:
    """All on one process, elsewhere fewer, as each has to be built."""
    return [*MODELS] if run == ALONE else FOUR.get(run, two_models_of(run))


def two_models_of(run: Run) -> list[str]:
    """They differ in architecture and in tying."""
    return [*MODELS][:2] if RUNS.index(run) % 2 == 0 else [*MODELS][2:]


def pairwise_trials(run: Run) -> list[Trial]:
    first, *others = LOSSES
    models, index = models_of(run), RUNS.index(run)
    ways = WAYS[(index + index // 3) % 3]
    trials = [
        Trial(
            models[(index + number) % len(models)],
            first,
            cut_of(way, index + number),
            num_steps=NUM_STEPS if number == index % 3 else 1,
        )
        for number, way in enumerate(ways)
    ]
    if run == ALONE:  # what they are not in WITH_OTHER_MODELS
        others_ways = (("llama", WAYS[2][0]), ("mistral", WAYS[1][1]), ("mistral", WAYS[0][2]))
        trials += [Trial(model, first, cut_of(way, number), 1) for number, (model, way) in enumerate(others_ways)]
    return trials + [latin_trial(models, others[number], number, place) for number, place in others_of(run)]


def others_of(run: Run) -> list[tuple[int, int]]:
    """The losses of a run next to the first, by number, and which of its three places it is for each."""
    every = range(len(LOSSES) - 1)
    if run == ALONE:
        return [(number, 0) for number in every]
    parts = (*CUT, SHARDED)
    return [(number, 1 + (run == SHARDED)) for number in every if run in parts and number % 3 == parts.index(run)]


def latin_trial(models: list[str], loss: str, number: int, place: int) -> Trial:
    """The three places of a loss have each size, way of packing and split, and models that differ."""
    way = WAYS[number % 3][(number // 3 + place) % 3]
    return Trial(models[(number + (place > 0)) % len(models)], loss, cut_of(way, number + place), num_steps=1)


def cut_of(way: tuple[int, bool, bool], split: int) -> Cut:
    size, is_packed, is_shared = way
    return Cut(size, is_packed, CUT_SPLITS[split % 3], is_shared)


def whole_product(run: Run) -> list[Trial]:
    """Every loss with its cuts on the first model, the clip with all cuts on every model."""
    models = list(MODELS)[:1] if run.layout in COMBINED else [*MODELS]
    models += OTHER_MODELS if run == WITH_OTHER_MODELS else []
    return [
        Trial(model, loss, cut)
        for model in models
        for loss in (LOSSES if model == models[0] and run.layout not in COMBINED else CLIPPED)
        for cut in LOSSES[loss].cuts
    ] + all_preference_trials(run)
