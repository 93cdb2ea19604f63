"""Implement the papers' formulae in float64, token by token and sample by sample, as a reference.

A formula that the policy's gradient passes through returns its value and its derivative. The one thing that no paper
has: a ratio is held at exp(20), beyond which it has no derivative, so that one astray token leaves the rest alive.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coati_rl.algorithms.loss import PolicyLoss

LARGEST_LOG_RATIO = 20.0  # nats
VERSION = 7  # of the weights that are trained

Floats = NDArray[np.float64]
Term = tuple[float, float]  # value, derivative


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The tokens of one response that the loss counts: float64[T] each."""

    logprobs: Floats
    old_logprobs: Floats
    rollout_logprobs: Floats
    ref_logprobs: Floats
    entropy: Floats
    advantages: Floats
    loss_weights: Floats
    policy_version: NDArray[np.int32]

    @property
    def length(self) -> int:
        """T."""
        return len(self.logprobs)


# --- advantages ---


def mean(values: Sequence[float]) -> float:
    """sum_i x_i / n."""
    return math.fsum(values) / len(values)


def group_norm(rewards: Sequence[float]) -> list[float]:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-6), unbiased. GRPO, arXiv:2402.03300 sec. 4.1.2."""
    squares = [(r - mean(rewards)) ** 2 for r in rewards]
    deviation = math.sqrt(math.fsum(squares) / (len(rewards) - 1))
    return [(r - mean(rewards)) / (deviation + 1e-6) for r in rewards]


def gdpo(rewards: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """A_i = sum_k w_k (R_ik - mean(R_k)) / (std(R_k) + 1e-6), before the batch's. GDPO, arXiv:2601.05242."""
    normalised = [group_norm(column) for column in zip(*rewards, strict=True)]
    return [math.fsum(w * a for w, a in zip(weights, row, strict=True)) for row in zip(*normalised, strict=True)]


def group_mean(rewards: Sequence[float]) -> list[float]:
    """A_i = R_i - mean(R). Dr. GRPO, arXiv:2503.20783 sec. 3.2."""
    return [r - mean(rewards) for r in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """A_i = R_i - 1 / (k - 1) sum_{j != i} R_j. RLOO, arXiv:2402.14740 sec. 3.3."""
    return [r - mean([*rewards[:i], *rewards[i + 1 :]]) for i, r in enumerate(rewards)]


def max_rl(rewards: Sequence[float]) -> list[float]:
    """(R_i - mean) / mean, with 1e-6. MaxRL, arXiv:2602.02710."""
    middle = mean(rewards)
    return [(r - middle) / (middle + 1e-6) if middle > 0 else 0.0 for r in rewards]


def opo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """R_i - sum_j T_j R_j / sum_j T_j. OPO, arXiv:2505.23585."""
    baseline = math.fsum(n * r for n, r in zip(lengths, rewards, strict=True)) / sum(lengths)
    return [r - baseline for r in rewards]


def remax(rewards: Sequence[float], baseline: float) -> list[float]:
    """A_i = R_i - R(greedy answer). ReMax, arXiv:2310.10505."""
    return [r - baseline for r in rewards]


def reward(rewards: Sequence[float]) -> list[float]:
    """A_i = R_i. REINFORCE++, arXiv:2501.03262."""
    return list(rewards)


def whitened(samples: Sequence[Sequence[float]]) -> list[list[float]]:
    """(A - mean) / sqrt(variance + 1e-8) over all tokens of the batch, biased. REINFORCE++, arXiv:2501.03262."""
    tokens = [a for sample in samples for a in sample]
    middle = mean(tokens)
    deviation = math.sqrt(mean([(a - middle) ** 2 for a in tokens]))
    return [[(a - middle) / math.sqrt(deviation**2 + 1e-8) for a in sample] for sample in samples]


def minus_kl_to_go(advantage: float, kl: Sequence[float], coeff: float) -> list[float]:
    """A_t = A - beta sum_{s = t}^{T} kl_s. REINFORCE++, arXiv:2501.03262, with gamma = 1."""
    return [advantage - coeff * math.fsum(kl[t:]) for t in range(len(kl))]


def over_length(length: int, max_length: int, cache_length: int) -> float:
    """Soft over-length punishment. DAPO, arXiv:2503.14476 eq. 13."""
    if length <= max_length - cache_length:
        return 0.0
    if length <= max_length:
        return ((max_length - cache_length) - length) / cache_length
    return -1.0


# --- token terms: value, and derivative by log pi ---


def exp_ratio(log_ratio: float) -> Term:
    """r = pi / pi_old and dr / dlog pi; held at exp(20)."""
    if log_ratio > LARGEST_LOG_RATIO:
        return math.exp(LARGEST_LOG_RATIO), 0.0
    return math.exp(log_ratio), math.exp(log_ratio)


def kl_term(logprob: float, ref_logprob: float, estimator: str) -> Term:
    """k1, k2, k3 of D = log pi - log pi_ref. Schulman (2020); k3 is eq. 4 of arXiv:2402.03300."""
    d = logprob - ref_logprob
    if estimator == "k1":
        return d, 1.0
    if estimator == "k2":
        return d * d / 2, d
    return math.exp(ref_logprob - logprob) - (ref_logprob - logprob) - 1, 1 - math.exp(-d)


def clip_term(log_ratio: float, advantage: float, low: float, high: float, dual: float | None) -> Term:
    """-min(r A, clip(r, 1 - low, 1 + high) A); at A < 0 not above -c A.

    PPO, arXiv:1707.06347 eq. 7; separate bounds DAPO, arXiv:2503.14476 eq. 8; dual clip arXiv:1912.09729 eq. 5.
    """
    r, slope = exp_ratio(log_ratio)
    bounded = 1 - low if r < 1 - low else 1 + high if r > 1 + high else r
    objective, derivative = r * advantage, slope * advantage
    if bounded * advantage < objective:
        objective, derivative = bounded * advantage, 0.0
    if dual is not None and advantage < 0 and objective < dual * advantage:
        objective, derivative = dual * advantage, 0.0
    return -objective, -derivative


def cispo_term(logprob: float, log_ratio: float, advantage: float, low: float, high: float) -> Term:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi. CISPO, arXiv:2506.13585 eq. 4 and 5."""
    weight = min(max(exp_ratio(log_ratio)[0], 1 - low), 1 + high)
    return -weight * advantage * logprob, -weight * advantage


def sapo_term(log_ratio: float, advantage: float, positive: float, negative: float) -> Term:
    """-4 / tau sigmoid(tau (r - 1)) A. SAPO, arXiv:2511.20347."""
    r, slope = exp_ratio(log_ratio)
    tau = positive if advantage > 0 else negative
    gate = 1 / (1 + math.exp(-tau * (r - 1))) if tau * (r - 1) > -700 else 0.0
    return -4 / tau * gate * advantage, -4 * gate * (1 - gate) * slope * advantage


def vespo_weight(log_w: float, advantage: float, positive: Sequence[float], negative: Sequence[float]) -> float:
    """phi(w) = w^k exp(lambda (1 - w)), k and lambda by the sign of A. VESPO, arXiv:2602.10693."""
    k, rate = negative if advantage < 0 else positive
    bounded = min(max(log_w, math.log(1e-8)), LARGEST_LOG_RATIO)
    return math.exp(rate + k * bounded - rate * math.exp(bounded))


# --- samples ---


def log_ratios(sample: Sample, level: str) -> tuple[list[float], Floats]:
    """log r_t, and [t, s] its derivative by log pi_s. Sequence level: GSPO, arXiv:2507.18071 eq. 7."""
    t = sample.length
    single = [float(sample.logprobs[i] - sample.old_logprobs[i]) for i in range(t)]
    if level == "token":
        return single, np.eye(t)
    return [mean(single)] * t, np.full((t, t), 1 / t)


def correction(sample: Sample, name: str, low: float, high: float) -> list[float]:
    """Weights of w = pi_old / pi_engine.

    tis: min(max(w, low), high), Yao et al. (2025); icepop: w inside the band, else 0, arXiv:2510.18855;
    sequence_tis: tis of prod w, TRL's sequence_truncate;
    sequence_mask: 1 if (prod w)^(1 / T) lies in the band, else 0; sequence_mask_tis: w there, OpenRLHF.
    """
    gaps = [float(o - e) for o, e in zip(sample.old_logprobs, sample.rollout_logprobs, strict=True)]
    weights = [exp_ratio(gap)[0] for gap in gaps]
    if name == "tis":
        return [min(max(w, low), high) for w in weights]
    if name == "icepop":
        return [w if low <= w <= high else 0.0 for w in weights]
    if name == "sequence_tis":
        return [min(max(exp_ratio(math.fsum(gaps))[0], low), high)] * len(gaps)
    if name.startswith("sequence_mask"):
        is_kept = low <= exp_ratio(mean(gaps))[0] <= high
        return [(w if name == "sequence_mask_tis" else 1.0) if is_kept else 0.0 for w in weights]
    return [1.0] * len(gaps)


def policy_terms(sample: Sample, loss: PolicyLoss) -> tuple[list[float], Floats]:
    """The policy's term of each token, and [t, s] its derivative by log pi_s."""
    ratios, inner = log_ratios(sample, loss.ratio_level)
    if loss.policy_loss == "gmpo":
        return gmpo_terms(sample, loss, ratios)
    terms, derivative = [], np.zeros((sample.length, sample.length))
    for t, log_ratio in enumerate(ratios):
        advantage = float(sample.advantages[t])
        if loss.policy_loss == "cispo":
            logprob = float(sample.logprobs[t])
            term, slope = cispo_term(logprob, log_ratio, advantage, loss.clip_low, loss.clip_high)
            derivative[t, t] = slope  # the ratio is only a weight
        elif loss.policy_loss == "vespo":
            bounded = math.fsum(min(max(r, -LARGEST_LOG_RATIO), LARGEST_LOG_RATIO) for r in ratios)
            slope = -vespo_weight(bounded, advantage, loss.vespo_positive, loss.vespo_negative) * advantage
            term = slope * float(sample.logprobs[t])
            derivative[t, t] = slope
        elif loss.policy_loss == "sapo":
            term, slope = sapo_term(log_ratio, advantage, loss.sapo_positive, loss.sapo_negative)
            derivative[t] = slope * inner[t]
        else:
            term, slope = clip_term(log_ratio, advantage, loss.clip_low, loss.clip_high, loss.clip_dual)
            derivative[t] = slope * inner[t]
        terms.append(term)
    return terms, derivative


def gmpo_terms(sample: Sample, loss: PolicyLoss, log_ratios: Sequence[float]) -> tuple[list[float], Floats]:
    """-A_t exp(mean_s of clipped log r_s), clipped above where A_s > 0 and below elsewhere. GMPO, arXiv:2507.20673."""
    is_above = [float(a) > 0 for a in sample.advantages]
    pairs = [*zip(log_ratios, is_above, strict=True)]
    clipped = [min(r, loss.clip_high) if above else max(r, -loss.clip_low) for r, above in pairs]
    moves = [r < loss.clip_high if above else r > -loss.clip_low for r, above in pairs]
    ratio, slope = exp_ratio(mean(clipped))
    terms = [-float(a) * ratio for a in sample.advantages]
    return terms, np.outer(-sample.advantages * slope, np.array(moves, dtype=float) / len(moves))


def is_masked(sample: Sample, loss: PolicyLoss) -> list[bool]:
    """A token of negative advantage in a sample of which the mean of log pi_engine - log pi is above the threshold.

    Off-policy sequence masking, arXiv:2512.02556 (DeepSeek-V3.2).
    """
    drift = mean([float(e - p) for e, p in zip(sample.rollout_logprobs, sample.logprobs, strict=True)])
    is_far = loss.drift_threshold is not None and drift > loss.drift_threshold
    return [is_far and float(a) < 0 for a in sample.advantages]


def sample_loss(sample: Sample, loss: PolicyLoss) -> tuple[float, Floats, Floats]:
    """sum_t w_t (c_t policy_t + kl_coeff kl_t - entropy_coeff H_t), 0 if a ratio exceeds the threshold.

    Returns: (value, its gradient by log pi, its gradient by the entropies).
    """
    value, gradient, entropy_gradient = 0.0, np.zeros(sample.length), np.zeros(sample.length)
    ratios, inner = log_ratios(sample, loss.ratio_level)
    if loss.skip_threshold is not None and max(exp_ratio(r)[0] for r in ratios) > loss.skip_threshold:
        return value, gradient, entropy_gradient
    terms, derivative = policy_terms(sample, loss)
    kept = [0.0 if masked else 1.0 for masked in is_masked(sample, loss)]
    weights = correction(sample, loss.correction, loss.correction_low, loss.correction_high)
    for t in range(sample.length):
        w = float(sample.loss_weights[t])
        kl, kl_slope = 0.0, 0.0
        if loss.kl_coeff > 0:
            kl, kl_slope = kl_term(float(sample.logprobs[t]), float(sample.ref_logprobs[t]), loss.kl_estimator)
        ratio, slope = exp_ratio(ratios[t]) if loss.kl_has_ratio else (1.0, 0.0)
        policy = kept[t] * weights[t]
        value += w * (policy * terms[t] + loss.kl_coeff * ratio * kl - loss.entropy_coeff * float(sample.entropy[t]))
        gradient += w * (policy * derivative[t] + loss.kl_coeff * kl * slope * inner[t])
        gradient[t] += w * loss.kl_coeff * ratio * kl_slope
        entropy_gradient[t] = -w * loss.entropy_coeff
    return value, gradient, entropy_gradient


def aggregated(samples: Sequence[Sequence[float]], mode: str, max_length: int) -> float:
    """One loss from the terms of samples.

    sample_level: 1/N sum_i 1/T_i sum_t, GRPO, arXiv:2402.03300 eq. 3; token_level: 1 / (sum_i T_i) sum_i sum_t, DAPO,
    arXiv:2503.14476 eq. 8; constant: 1/N sum_i 1/L_max sum_t, Dr. GRPO, arXiv:2503.20783 sec. 3.2.
    """
    if mode == "sample_level":
        return mean([mean(terms) for terms in samples])
    if mode == "token_level":
        return mean([term for terms in samples for term in terms])
    return mean([math.fsum(terms) / max_length for terms in samples])
