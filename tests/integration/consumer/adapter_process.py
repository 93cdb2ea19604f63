"""Run a trainer of adapters that takes two steps, the second once more from a checkpoint between them."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coati_rl.model_files.adapter_files import AdapterSpec
from consumer.adapters.adapters import AdapterSource
from consumer.backend import Backend
from consumer.sent_weights import SentWeights
from tests.integration.consumer import reward_cases
from tests.integration.consumer.conftest import EVERY_LAYOUT, LEARNING_RATE
from tests.integration.consumer.gradient_matrix import CASES
from tests.integration.consumer.gradient_process import StepRecorder, share_of, take_whole_step
from tests.integration.consumer.losses import Cut
from tests.integration.consumer.reward_process import RewardCut
from tests.integration.consumer.reward_process import mini_batches_of as reward_batches_of
from tests.integration.consumer.samples import samples_near, to_mini_batch
from tests.integration.consumer.trainer import make_trainer

SPEC = AdapterSpec(rank=4, alpha=12.0, targets=("all-linear",))
START, MERGED = "adapter", "merged"  # in the directory of a model: the adapters it begins with, and it with them
SCORED = "scored"  # beside them, a model with a scalar head, which has adapters and a merged model of its own


class Trial(NamedTuple):
    """A layout in a precision, a model of an architecture, a loss, and how its samples are cut."""

    layout: str
    precision: str
    model: str
    loss: str
    cut: Cut
    has_four_bits: bool = False  # of the base

    @property
    def name(self) -> str:
        cut = "-".join(map(str, self.cut))
        bits = "-4bit" if self.has_four_bits else ""
        return f"{self.layout}-{self.precision}-{self.model}-{self.loss.replace(' ', '_')}-{cut}{bits}"

    @property
    def is_scored(self) -> bool:
        return self.loss in reward_cases.CASES

    def model_dir(self, models: Path) -> Path:
        return models / self.model / SCORED if self.is_scored else models / self.model


def trainer_of(trial: Trial, model_dir: Path, start: Path) -> Backend:
    head = reward_cases.CASES[trial.loss].head if trial.is_scored else None
    source = AdapterSource(spec=SPEC, base=str(model_dir), directory=start, has_four_bits=trial.has_four_bits)
    settings = EVERY_LAYOUT[trial.layout][1]
    return make_trainer(model_dir, precision=trial.precision, adapters=source, scalar_head=head, **settings)


class Recorder(StepRecorder):
    """A recorder of whole gradients: those of adapters are small."""

    def optimizer_step(self, *, loss_scale: float, **settings: Any) -> float:
        norm = super().optimizer_step(loss_scale=loss_scale, **settings)
        parameters, gradients = self._backend.policy.parameters, self.taken["gradients"]
        self.taken["gradients"] = {name: parameters.full_state(name, each).clone() for name, each in gradients.items()}
        return norm


def take_one(backend: Backend, model_dir: Path, trial: Trial, step: int) -> dict[str, Any]:
    recorder = Recorder(backend)
    if trial.is_scored:
        take_scored(recorder, trial, step)
    else:
        take_whole_step(recorder, model_dir / MERGED, CASES[trial.loss], trial.cut, step)
    return {**recorder.taken, **weights_of(backend)}


def take_scored(recorder: Any, trial: Trial, step: int) -> None:
    case = reward_cases.CASES[trial.loss]
    samples = case.samples(step)
    scale = 1 / case.denominator(samples)
    num_mini_batches = 2 if trial.cut.split == "uneven" else 1
    cut = RewardCut(trial.cut.size * case.objective.unit, trial.cut.packed, num_mini_batches)
    parts = [case.objective.targets(part)[0] for part in reward_batches_of(case, samples, cut, recorder)]
    for number, micro_batches in enumerate(parts, 1):
        batch = to_mini_batch(micro_batches, step=step, is_last=number == len(parts), scale=scale)
        recorder.forward_backward(batch, case.objective.losses["policy"])
    recorder.optimizer_step(loss_scale=scale, learning_rate=LEARNING_RATE)


def weights_of(backend: Backend) -> dict[str, dict[str, Tensor]]:
    """The merged weights, the trained ones as they are, and the adapters as they are sent alone."""
    policy = backend.policy
    trained = {name: policy.parameters.full_weight(name).clone() for name in policy.parameters.trained}
    alone = SentWeights(policy, backend.layout, torch.float32, base=Path())
    return {
        "merged": {name: each.clone() for name, each in policy.export(torch.float32)},
        "trained": trained,
        "alone": {name: each.clone() for name, each in alone.tensors()},
    }


def scores_of(backend: Backend, model_dir: Path) -> dict[str, list[Tensor]]:
    """Of the policy, and of what shares its base, on some samples of the first step."""
    samples = samples_near(model_dir / MERGED, 0)[:NUM_SCORED]
    micro_batches = [each for sample in samples for each in share_of([sample], backend, CASES["clip"], ALONE)]
    return {role: backend.score(micro_batches, role) for role in ("policy", *backend._views)}


ALONE = Cut(1, True, "one")
NUM_SCORED = 3
# Layouts with as many ranks, in which a checkpoint's run goes on, too.
ELSEWHERE = {
    "dp2": "tp2",
    "tp2": "fsdp2_dp2",
    "pp2": "dp2",
    "fsdp2_dp2": "pp2",
    "zero1_dp2": "zero2_dp2",
    "zero2_dp2": "zero1_dp2",
    "ep2": "fsdp2_dp2",
    "tp2_pp2": "pp2_dp2",
    "pp2_dp2": "tp2_pp2",
}


def take_trials(rank: int, out_dir: Path, models: Path, trials: Sequence[Trial]) -> None:
    for trial in trials:
        found = dict(steps_of(trial, trial.model_dir(models), out_dir / trial.name / "step-1"))
        torch.save(found, out_dir / f"{trial.name}-rank{rank}.pt")


def steps_of(trial: Trial, model_dir: Path, saved: Path) -> Iterator[tuple[str, Any]]:
    backend = trainer_of(trial, model_dir, model_dir / START)
    has_scores = not trial.is_scored and backend.layout.num_data_ranks == 1
    if has_scores:
        yield "start scores", scores_of(backend, model_dir)
    yield "first", take_one(backend, model_dir, trial, 0)
    backend.save(saved, state={"step": 1})
    if has_scores:
        backend.keep_old_policy()
        yield "middle scores", scores_of(backend, model_dir)
    yield "second", take_one(backend, model_dir, trial, 1)
    if has_scores:
        yield "end scores", scores_of(backend, model_dir)
    backend.close()
    again = trainer_of(trial, model_dir, saved)
    again.restore(saved)
    yield "resumed", take_one(again, model_dir, trial, 1)
    again.close()
    if trial.layout in ELSEWHERE and not trial.has_four_bits:  # some of these layouts take no base in 4 bits
        elsewhere = trial._replace(layout=ELSEWHERE[trial.layout])
        other = trainer_of(elsewhere, model_dir, saved)
        other.restore(saved)
        yield "elsewhere", take_one(other, model_dir, elsewhere, 1)
        other.close()


def worst_of(found: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative difference of a tensor, and its name."""
    assert found.keys() == right.keys()
    return max((float((found[name] - each).norm() / each.norm()), name) for name, each in right.items())


def whole(ranks: Sequence[dict[str, Any]], what: str, kind: str) -> dict[str, Tensor]:
    """Join what the pipeline stages hold."""
    return dict(itertools.chain.from_iterable(rank[what][kind].items() for rank in ranks))
