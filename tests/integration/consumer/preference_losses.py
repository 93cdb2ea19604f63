"""Define every objective on units of two samples in plain torch on a step's responses.

As in `losses`, the formulas are written from the papers that docs/paper_index.md names.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from coati_rl.algorithms.aggregation import LossVariation
from consumer.objectives.kto import DESIRABLE, Kto
from consumer.objectives.objective import Objective
from consumer.objectives.preference import Preference
from tests.integration.consumer.losses import Cut, Response

StepFormula = Callable[[Sequence[Response]], Tensor]  # to float32[]: the loss of a step
PairFormula = Callable[[Response, Response], Tensor]  # of a chosen and a rejected one, to float32[]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCase:
    """An objective on units of two samples and its plain formula; see `losses.LossCase`."""

    objective: Objective
    formula: StepFormula
    without: StepFormula
    cuts: tuple[Cut, ...]  # sizes are in units
    kind: str = "plain"
    unit: int = 2
    aggregation: LossVariation = "sample_level"
    recomputes_old: bool = False


def of_pairs(formula: PairFormula) -> StepFormula:
    """Average over pairs."""

    def step(responses: Sequence[Response]) -> Tensor:
        pairs = zip(responses[::2], responses[1::2], strict=True)
        return torch.stack([formula(chosen, rejected) for chosen, rejected in pairs]).mean()

    return step


def margin(chosen: Response, rejected: Response) -> Tensor:
    return chosen.k1.sum() - rejected.k1.sum()


def dpo(chosen: Response, rejected: Response, *, beta: float = 0.3) -> Tensor:
    return -logsigmoid(beta * margin(chosen, rejected))


def without_reference(chosen: Response, rejected: Response) -> Tensor:
    return -logsigmoid(0.3 * (chosen.logprobs.sum() - rejected.logprobs.sum()))


def smoothed_with_nll(chosen: Response, rejected: Response) -> Tensor:
    return 0.8 * dpo(chosen, rejected) + 0.2 * dpo(rejected, chosen) - 0.5 * chosen.logprobs.mean()


def robust(chosen: Response, rejected: Response) -> Tensor:
    # At a larger beta bfloat16's rounding would show in the loss, as the weights here are 0.8 / 0.6 and 0.2 / 0.6.
    return (0.8 * dpo(chosen, rejected, beta=0.15) - 0.2 * dpo(rejected, chosen, beta=0.15)) / 0.6


def ipo(chosen: Response, rejected: Response) -> Tensor:
    return (chosen.k1.mean() - rejected.k1.mean() - 1 / (2 * 0.5)) ** 2


def simpo(chosen: Response, rejected: Response) -> Tensor:
    return -logsigmoid(2.0 * (chosen.logprobs.mean() - rejected.logprobs.mean()) - 1.5)


def simpo_without_margin(chosen: Response, rejected: Response) -> Tensor:
    return -logsigmoid(2.0 * (chosen.logprobs.mean() - rejected.logprobs.mean()))


def likelihood(chosen: Response, rejected: Response) -> Tensor:
    return -chosen.logprobs.mean()


def orpo(chosen: Response, rejected: Response) -> Tensor:
    p, q = (response.logprobs.mean().exp() for response in (chosen, rejected))
    return likelihood(chosen, rejected) - 2.0 * logsigmoid(torch.log(p / (1 - p)) - torch.log(q / (1 - q)))


def kto(responses: Sequence[Response]) -> Tensor:
    return _kto(responses, torch.stack([other.k1.detach().sum() for other in responses[1::2]]).mean().clamp(min=0))


def kto_of_each_unit(responses: Sequence[Response]) -> Tensor:
    """With a KL estimate for each example from its own mismatched completion."""
    units = [responses[i : i + 2] for i in range(0, len(responses), 2)]
    return torch.stack([_kto(unit, unit[1].k1.detach().sum().clamp(min=0)) for unit in units]).mean()


def _kto(responses: Sequence[Response], kl: Tensor) -> Tensor:
    terms = []
    for response in responses[::2]:
        is_desirable = response.label == DESIRABLE
        sign, weight = (1, 1.5) if is_desirable else (-1, 0.75)
        terms.append(weight * (1 - torch.sigmoid(1.2 * sign * (response.k1.sum() - kl))))
    return torch.stack(terms).mean()


def pair_case(loss: Preference, formula: PairFormula, without: PairFormula, *cuts: Cut) -> UnitCase:
    return UnitCase(objective=loss, formula=of_pairs(formula), without=of_pairs(without), cuts=cuts)


PREFERENCES: dict[str, UnitCase] = {
    "dpo": pair_case(Preference(beta=0.3), dpo, without_reference, Cut(2, True, "uneven", True), Cut(1, False, "one")),
    "cdpo, nll": pair_case(
        Preference(beta=0.3, label_smoothing=0.2, nll_coeff=0.5), smoothed_with_nll, dpo, Cut(4, True, "several")
    ),
    "robust dpo": pair_case(
        Preference(loss="robust", beta=0.15, label_smoothing=0.2),
        robust,
        functools.partial(dpo, beta=0.15),
        Cut(1, True, "uneven"),
    ),
    "ipo": pair_case(Preference(loss="ipo", beta=0.5), ipo, dpo, Cut(2, False, "several")),
    "simpo": pair_case(
        Preference(loss="simpo", beta=2.0, simpo_gamma=1.5), simpo, simpo_without_margin, Cut(2, True, "one", True)
    ),
    "orpo": pair_case(Preference(loss="orpo", orpo_lambda=2.0), orpo, likelihood, Cut(4, False, "uneven")),
    "kto": UnitCase(
        objective=Kto(beta=1.2, desirable_weight=1.5, undesirable_weight=0.75),
        formula=kto,
        without=kto_of_each_unit,
        cuts=(Cut(1, True, "uneven"), Cut(2, False, "several")),
        kind="labelled",
    ),
}
