"""Define every loss in plain torch on one response at a time, and the splits of a step to test it with.

The plain formulas are written from the papers that docs/algorithms.md names and share nothing with the package. T
tokens of a response, V vocabulary.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from coati_rl.algorithms.aggregation import LossVariation
from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.protocols import LossFn
from consumer.objectives.cross_entropy import CrossEntropy
from tests.integration.consumer.samples import Sample, chosen_logprobs


class Cut(NamedTuple):
    """How the samples of a step are executed."""

    size: int  # samples per micro-batch
    packed: bool  # in one row; else one per row
    split: str  # into mini-batches: one, several or uneven ones
    shared: bool = False  # packed rows compute a common prefix once


CUT_SIZES, CUT_SPLITS = (1, 2, 4), ("one", "several", "uneven")
ALL_CUTS = tuple(
    Cut(size, packed, CUT_SPLITS[index % 3], shared)
    for index, ((packed, shared), size) in enumerate(
        itertools.product(((True, False), (False, False), (True, True)), CUT_SIZES)
    )
)


class Response:
    """Hold the inputs of a formula; the response's log-probabilities and entropies carry gradient."""

    def __init__(self, sample: Sample, log_softmax: Tensor, ref_logprobs: Tensor) -> None:
        """`log_softmax`: float32[T, V]. All below are float32[T], the advantage float32[T] or float32[]."""
        rollout = torch.tensor(sample.rollout_logprobs)
        old = rollout if sample.old_logprobs is None else torch.tensor(sample.old_logprobs)
        self.advantage = torch.tensor(sample.advantage, dtype=torch.float32)
        self.label = sample.label
        self.logprobs = chosen_logprobs(log_softmax, sample)
        self.entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1)
        self.old, self.rollout = old, rollout
        self.ratio = torch.exp(self.logprobs - old)
        self.sequence_ratio = torch.exp((self.logprobs - old).mean()).expand_as(old)
        self.weight = torch.exp(old - rollout)
        self.sequence_weight = torch.exp((old - rollout).mean())
        self.k1 = self.logprobs - ref_logprobs
        self.k2 = self.k1**2 / 2
        self.k3 = torch.exp(-self.k1) - 1 + self.k1


Formula = Callable[[Response], Tensor]  # to float32[T]: what is minimised


def surrogate(response: Response) -> Tensor:
    """PPO without a clip."""
    return -response.ratio * response.advantage


def weighed(response: Response) -> Tensor:
    """REINFORCE with the importance weight as it is; as large as the gradient of `surrogate`."""
    return -response.ratio.detach() * response.advantage * response.logprobs


def clipped(response: Response, ratio: Tensor | None = None) -> Tensor:
    ratio = response.ratio if ratio is None else ratio
    return -torch.min(ratio * response.advantage, ratio.clamp(0.8, 1.28) * response.advantage)


def clipped_sequence(response: Response) -> Tensor:
    return clipped(response, response.sequence_ratio)


def dual_clipped(response: Response) -> Tensor:
    if response.advantage >= 0:
        return clipped(response)
    return -torch.max(-clipped(response), 1.4 * response.advantage)


def cispo(response: Response) -> Tensor:
    return -response.ratio.detach().clamp(0.8, 1.28) * response.advantage * response.logprobs


def soft_gated(response: Response) -> Tensor:
    tau = 1.0 if response.advantage > 0 else 1.05
    return -4 / tau * torch.sigmoid(tau * (response.ratio - 1)) * response.advantage


def geometric_mean(response: Response) -> Tensor:
    logs = response.ratio.log()
    bounded = logs.clamp(max=0.28) if response.advantage > 0 else logs.clamp(min=-0.2)
    return -bounded.mean().exp() * response.advantage.expand_as(logs)


def softly_weighed(response: Response) -> Tensor:
    """The product of the ratios is the whole response's, of which a weight is made that carries no gradient.

    Smaller powers than the paper's: the third power of a product of eight ratios is three times as far off in bfloat16.
    """
    w = response.ratio.detach().prod()
    k, rate = (0.6, 0.5) if response.advantage < 0 else (0.5, 0.6)
    weight = w**k * torch.exp(rate * (1 - w)) * response.weight.prod().clamp(max=2.0)
    return -weight * response.advantage * response.logprobs


def masked_as_a_whole(response: Response) -> Tensor:
    """Samples that the policy has left have no policy term where the advantage is negative; KL is weighed."""
    is_left = response.advantage < 0 and (response.rollout - response.logprobs).mean() > 0.1
    return float(not is_left) * geometric_mean(response) + response.ratio * response.k3


def grpo(response: Response) -> Tensor:
    return clipped(response) + response.k3


def corrected(response: Response) -> Tensor:
    """The KL penalty is under the policy's own samples: it is not weighed."""
    return response.weight * clipped(response) + response.k3


def truncated(response: Response) -> Tensor:
    return response.weight.clamp(0.5, 2.0) * clipped(response) + response.k3


def in_band(response: Response) -> Tensor:
    is_inside = (response.weight > 0.5) & (response.weight < 2.0)
    return is_inside * response.weight * clipped(response)


def masked_sequence(response: Response) -> Tensor:
    return float(0.5 < response.sequence_weight < 4.0) * clipped(response)


def skipped(response: Response) -> Tensor:
    """Nothing of a skipped sample counts."""
    return float(response.ratio.max() < 2.2) * grpo(response)


def explored_sequence(response: Response) -> Tensor:
    return clipped_sequence(response) - 10.0 * response.entropy


def skipped_sequence(response: Response) -> Tensor:
    return float(response.sequence_ratio[0] < 1.4) * explored_sequence(response)


def cross_entropy(response: Response) -> Tensor:
    return -response.logprobs


def users(response: Response) -> Tensor:
    return -response.advantage * response.logprobs + (response.logprobs - response.old) ** 2


def users_terms(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
    """The same as a user hands it in."""
    apart = torch.where(arrays["loss_mask"], logprobs - old_logprobs, 0.0)
    return apart.square() - advantages * logprobs


users_terms_by_token: Any = functools.partial(users_terms)
users_terms_by_token.is_token_separable = True


@dataclass(frozen=True)
class Unseparated:
    """The same loss, which does not say that it may be evaluated token by token."""

    loss: LossFn
    is_token_separable: ClassVar[bool] = False

    def is_final(self, sums: Mapping[str, Tensor]) -> bool:
        raise AssertionError("asked only after an evaluation by tokens")

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, micro_batch: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return self.loss(logprobs, entropy, micro_batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCase:
    """A loss and its plain formula."""

    loss: PolicyLoss | CrossEntropy
    formula: Formula
    without: Formula  # the formula without what this case is about, which must differ
    cuts: tuple[Cut, ...]
    aggregation: LossVariation = "sample_level"
    recomputes_old: bool = False
    is_whole: bool = False  # evaluated on whole samples even if it could be token by token
    kind: str = "plain"  # of the samples, see `KINDS`
    unit: int = 1  # samples that stay together

    @property
    def has_reference(self) -> bool:
        return isinstance(self.loss, PolicyLoss) and self.loss.kl_coeff > 0

    @property
    def loss_fn(self) -> LossFn:
        return Unseparated(self.loss) if self.is_whole else self.loss


def case(formula: Formula, without: Formula, *cuts: Cut, **settings: Any) -> LossCase:
    """The clip's bounds are 0.2 and 0.28; settings of the case itself are told from those of the loss."""
    names = {field.name for field in dataclasses.fields(LossCase)}
    own = {name: value for name, value in settings.items() if name in names}
    if formula is cross_entropy:
        return LossCase(loss=CrossEntropy(), formula=formula, without=without, cuts=cuts, **own)
    loss = PolicyLoss(**{"clip_low": 0.2, "clip_high": 0.28, **{n: v for n, v in settings.items() if n not in own}})
    return LossCase(loss=loss, formula=formula, without=without, cuts=cuts, **own)


NUM_SKIPPED = 3  # samples of a step whose ratios are above the thresholds below: their mean is exp(0.6)
BAND: dict[str, Any] = {"correction_low": 0.5, "correction_high": 2.0, "recomputes_old": True}
WIDE: dict[str, Any] = {**BAND, "correction_high": 4.0}
BAND_BELOW: dict[str, Any] = {**BAND, "correction_low": 0.0}
LOSSES: dict[str, LossCase] = {
    "clip": case(grpo, clipped, *ALL_CUTS, kl_coeff=1.0),
    "clip, whole": case(grpo, surrogate, Cut(2, True, "uneven"), Cut(2, False, "one"), kl_coeff=1.0, is_whole=True),
    "by token": case(clipped, clipped, Cut(2, True, "uneven"), aggregation="token_level"),
    "by length": case(clipped, clipped, Cut(1, False, "several"), aggregation="constant"),
    "dual clip": case(dual_clipped, clipped, Cut(4, True, "one"), clip_dual=1.4),
    "sequence": case(clipped_sequence, clipped, Cut(2, True, "uneven"), Cut(4, False, "one"), ratio_level="sequence"),
    "cispo": case(cispo, weighed, Cut(1, True, "uneven"), policy_loss="cispo", recomputes_old=True),
    "k1": case(lambda r: clipped(r) + r.k1, clipped, Cut(2, False, "several"), kl_coeff=1.0, kl_estimator="k1"),
    "k2": case(lambda r: clipped(r) + r.k2, clipped, Cut(4, True, "several"), kl_coeff=1.0, kl_estimator="k2"),
    "tis": case(truncated, corrected, Cut(2, True, "one"), correction="tis", kl_coeff=1.0, **BAND),
    "icepop": case(in_band, clipped, Cut(4, False, "uneven"), correction="icepop", **BAND),
    "sequence mask": case(masked_sequence, clipped, Cut(2, True, "uneven"), correction="sequence_mask", **WIDE),
    "entropy": case(lambda r: clipped(r) - 10.0 * r.entropy, clipped, Cut(1, False, "one"), entropy_coeff=10.0),
    "skip": case(skipped, grpo, Cut(2, True, "several"), skip_threshold=2.2, kl_coeff=1.0),
    "skip, sequence": case(
        skipped_sequence,
        explored_sequence,
        Cut(4, True, "uneven"),
        skip_threshold=1.4,
        ratio_level="sequence",
        entropy_coeff=10.0,
    ),
    "holes": case(grpo, clipped, Cut(2, True, "uneven"), Cut(2, False, "one"), kl_coeff=1.0, kind="holes"),
    "forked turns": case(
        grpo, clipped, Cut(2, True, "one"), Cut(4, True, "several"), kl_coeff=1.0, kind="forked turns"
    ),
    "forked, sequence": case(clipped_sequence, clipped, Cut(4, True, "one"), ratio_level="sequence", kind="forked"),
    "cross-entropy": case(cross_entropy, clipped, Cut(4, True, "uneven"), aggregation="token_level", kind="holes"),
    "user's": case(users, clipped, Cut(2, False, "uneven"), terms_fn=users_terms),
    "user's, by token": case(users, clipped, Cut(4, True, "several"), terms_fn=users_terms_by_token),
    "sapo": case(soft_gated, surrogate, Cut(2, True, "uneven"), policy_loss="sapo"),
    "gmpo, masked": case(
        masked_as_a_whole,
        lambda r: geometric_mean(r) + r.k3,
        Cut(4, True, "several"),
        policy_loss="gmpo",
        drift_threshold=0.1,
        kl_coeff=1.0,
        kl_has_ratio=True,
    ),
    "vespo": case(
        softly_weighed,
        weighed,
        Cut(2, False, "uneven"),
        policy_loss="vespo",
        vespo_positive=(0.5, 0.6),
        vespo_negative=(0.6, 0.5),
        correction="sequence_tis",
        **BAND_BELOW,
    ),
}
