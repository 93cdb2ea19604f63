"""Implement each algorithm's loss as in its paper, from rewards and log-probabilities to one number, in float64.

One function an algorithm, which reads like its equation. The sign is that of a loss; L_MAX is the longest response.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

L_MAX = 8  # tokens

Floats = NDArray[np.float64]


@dataclass
class Response:
    """Hold the data of a response; float64[T] each."""

    reward: float
    logprobs: Floats
    old_logprobs: Floats
    ref_logprobs: Floats

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def ratio(self) -> Floats:
        """pi / pi_old."""
        return np.exp(self.logprobs - self.old_logprobs)

    @property
    def old_kl(self) -> Floats:
        """log pi_old - log pi_ref: k1 of the policy that sampled."""
        return self.old_logprobs - self.ref_logprobs


Group = Sequence[Response]


def rewards_of(group: Group) -> Floats:
    return np.array([response.reward for response in group])


def normed(group: Group) -> Floats:
    rewards = rewards_of(group)
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)


def surrogate(ratio: Floats, advantage: Floats | float, low: float, high: float) -> Floats:
    """min(r A, clip(r, 1 - low, 1 + high) A)."""
    return np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)


def kl_to_go(response: Response) -> Floats:
    return np.array([response.old_kl[t:].sum() for t in range(len(response))])


def white(advantages: Sequence[Floats]) -> list[Floats]:
    tokens = np.concatenate(advantages)
    return [(advantage - tokens.mean()) / np.sqrt(tokens.var() + 1e-8) for advantage in advantages]


def grpo(groups: Sequence[Group]) -> float:
    """arXiv:2402.03300 eq. 3 and 4: the mean over responses of the mean over their tokens, with k3 in it."""
    means = []
    for group in groups:
        for response, advantage in zip(group, normed(group), strict=True):
            d = response.ref_logprobs - response.logprobs
            k3 = np.exp(d) - d - 1
            means.append(np.mean(surrogate(response.ratio, advantage, 0.2, 0.2) - 0.01 * k3))
    return -float(np.mean(means))


def dapo(groups: Sequence[Group]) -> float:
    """arXiv:2503.14476 eq. 8 and 13: the mean over all tokens, no KL; rewards with the over-length punishment.

    L_max is 8, of which the last 2 (a quarter) are L_cache.
    """
    terms = []
    for group in groups:
        punished = [Response(**{**vars(r), "reward": r.reward + min(max((6 - len(r)) / 2, -1), 0)}) for r in group]
        for response, advantage in zip(group, normed(punished), strict=True):
            terms.append(surrogate(response.ratio, advantage, 0.2, 0.28))
    return -float(np.mean(np.concatenate(terms)))


def dr_grpo(groups: Sequence[Group]) -> float:
    """arXiv:2503.20783 sec. 3.2: no deviation in the advantage, L_max in the place of the response's length."""
    sums = []
    for group in groups:
        for response, advantage in zip(group, rewards_of(group) - rewards_of(group).mean(), strict=True):
            sums.append(surrogate(response.ratio, advantage, 0.2, 0.2).sum() / L_MAX)
    return -float(np.mean(sums))


def gspo(groups: Sequence[Group]) -> float:
    """arXiv:2507.18071 eq. 5 to 7: one ratio a response, the geometric mean of its tokens'."""
    terms = []
    for group in groups:
        for response, advantage in zip(group, normed(group), strict=True):
            s = np.prod(response.ratio) ** (1 / len(response))
            terms.append(surrogate(s, advantage, 3e-4, 4e-4))
    return -float(np.mean(terms))


def cispo(groups: Sequence[Group], *, sampled: Sequence[Group]) -> float:
    """arXiv:2506.13585 eq. 4 and 5, with weights that `sampled` fixes, as a stop-gradient does: at most 5."""
    terms = []
    for group, fixed in zip(groups, sampled, strict=True):
        for response, weighed, advantage in zip(group, fixed, normed(group), strict=True):
            terms.append(np.minimum(weighed.ratio, 5.0) * advantage * response.logprobs)
    return -float(np.mean(np.concatenate(terms)))


def sapo(groups: Sequence[Group]) -> float:
    """arXiv:2511.20347: the mean over responses of the mean over tokens of f(r) A, tau by the sign of A."""
    means = []
    for group in groups:
        for response, advantage in zip(group, normed(group), strict=True):
            tau = 1.0 if advantage > 0 else 1.05
            means.append(np.mean(4 / tau / (1 + np.exp(-tau * (response.ratio - 1))) * advantage))
    return -float(np.mean(means))


def gmpo(groups: Sequence[Group]) -> float:
    """arXiv:2507.20673: one ratio a response, the geometric mean of ratios that are clipped one by one, by e^0.4."""
    terms = []
    for group in groups:
        for response, advantage in zip(group, normed(group), strict=True):
            bounded = np.clip(response.ratio, math.exp(-0.4), math.exp(0.4))
            one_sided = np.minimum if advantage > 0 else np.maximum
            terms.append(np.prod(one_sided(response.ratio, bounded)) ** (1 / len(response)) * advantage)
    return -float(np.mean(terms))


def vespo(groups: Sequence[Group], *, sampled: Sequence[Group]) -> float:
    """arXiv:2602.10693: log pi weighed by w^k exp(lambda (1 - w)), w the whole response's ratio, held by `sampled`."""
    terms = []
    for group, fixed in zip(groups, sampled, strict=True):
        for response, weighed, advantage in zip(group, fixed, normed(group), strict=True):
            w, (k, rate) = np.prod(weighed.ratio), (3.0, 2.0) if advantage < 0 else (2.0, 3.0)
            terms.append(w**k * np.exp(rate * (1 - w)) * advantage * response.logprobs)
    return -float(np.mean(np.concatenate(terms)))


def luspo(groups: Sequence[Group]) -> float:
    """arXiv:2602.05261: GSPO with the sum over a response's tokens, here divided by L_MAX."""
    terms = []
    for group in groups:
        for response, advantage in zip(group, normed(group), strict=True):
            s = np.prod(response.ratio) ** (1 / len(response))
            terms.append(len(response) / L_MAX * surrogate(s, advantage, 3e-4, 4e-4))
    return -float(np.mean(terms))


def maxrl(groups: Sequence[Group]) -> float:
    """arXiv:2602.02710: the reward less its mean, divided by the mean; groups without a positive mean teach nothing."""
    terms = []
    for group in groups:
        middle = rewards_of(group).mean()
        for response in group:
            advantage = (response.reward - middle) / (middle + 1e-6) if middle > 0 else 0.0
            terms.append(surrogate(response.ratio, advantage, 0.2, 0.2))
    return -float(np.mean(np.concatenate(terms)))


def opo(groups: Sequence[Group]) -> float:
    """arXiv:2505.23585: the baseline of least variance, rewards weighed by lengths; a response's sum over L_MAX."""
    sums = []
    for group in groups:
        baseline = sum(len(response) * response.reward for response in group) / sum(map(len, group))
        for response in group:
            sums.append(surrogate(response.ratio, response.reward - baseline, 0.2, 0.2).sum() / L_MAX)
    return -float(np.mean(sums))


def covariances(groups: Sequence[Group]) -> list[Floats]:
    """arXiv:2505.22617: (log pi - mean) (A - mean) of each token, with means over all tokens, of the old policy."""
    responses = [response for group in groups for response in group]
    advantages = [np.full(len(r), a) for group in groups for r, a in zip(group, normed(group), strict=True)]
    all_of_them, logprobs = np.concatenate(advantages), np.concatenate([r.old_logprobs for r in responses])
    pairs = zip(advantages, responses, strict=True)
    return [(a - all_of_them.mean()) * (r.old_logprobs - logprobs.mean()) for a, r in pairs]


def clip_cov(groups: Sequence[Group]) -> float:
    """arXiv:2505.22617: no term of a share of the tokens with a covariance in (1, 5), here of all of them."""
    responses = [(r, a) for group in groups for r, a in zip(group, normed(group), strict=True)]
    terms = []
    for (response, advantage), covariance in zip(responses, covariances(groups), strict=True):
        is_inside = (covariance > 1) & (covariance < 5)
        terms.append(np.where(is_inside, 0.0, surrogate(response.ratio, advantage, 0.2, 0.2)))
    return -float(np.mean(np.concatenate(terms)))


def kl_cov(groups: Sequence[Group]) -> float:
    """arXiv:2505.22617: no clip; |log ratio| on the token of largest covariance, to which the share comes here."""
    responses = [(r, a) for group in groups for r, a in zip(group, normed(group), strict=True)]
    found, terms = covariances(groups), []
    largest = np.concatenate(found).max()
    for (response, advantage), covariance in zip(responses, found, strict=True):
        held = np.abs(np.log(response.ratio)) * (covariance == largest)
        terms.append(response.ratio * advantage - held)
    return -float(np.mean(np.concatenate(terms)))


def rloo(groups: Sequence[Group]) -> float:
    """arXiv:2402.14740 sec. 3.3: the mean of the others' rewards as baseline; per token KL to go as REINFORCE has it.

    The paper takes beta KL of the whole response off its reward, before the baseline. The tokens before t and the
    others' KL add nothing to the expected gradient at t, so that what stands here has the same one. The clip is PPO's,
    which acts only on steps after the first.
    """
    sums = []
    for group in groups:
        for i, response in enumerate(group):
            others = np.mean([other.reward for j, other in enumerate(group) if j != i])
            advantage = response.reward - others - 0.01 * kl_to_go(response)
            sums.append(surrogate(response.ratio, advantage, 0.2, 0.2).sum() / L_MAX)
    return -float(np.mean(sums))


def remax(groups: Sequence[Group], *, greedy_rewards: Sequence[float]) -> float:
    """arXiv:2310.10505 alg. 1: the reward of the greedy answer as baseline, KL of sampled tokens to go; REINFORCE.

    The paper's sum over a response's tokens, here divided by L_MAX; the clip is PPO's, which acts only on steps after
    the first.
    """
    sums = []
    for group, greedy_reward in zip(groups, greedy_rewards, strict=True):
        for response in group:
            advantage = response.reward - greedy_reward - 0.01 * kl_to_go(response)
            sums.append(surrogate(response.ratio, advantage, 0.2, 0.2).sum() / L_MAX)
    return -float(np.mean(sums))


def reinforce_pp(groups: Sequence[Group]) -> float:
    """arXiv:2501.03262: A_t = R - beta sum_{s >= t} KL_s, normalised over the global batch; no group."""
    responses = [response for group in groups for response in group]
    advantages = white([response.reward - 0.01 * kl_to_go(response) for response in responses])
    terms = [surrogate(r.ratio, a, 0.2, 0.2) for r, a in zip(responses, advantages, strict=True)]
    return -float(np.mean(np.concatenate(terms)))


def reinforce_pp_baseline(groups: Sequence[Group]) -> float:
    """arXiv:2501.03262: the group's mean off, then normalised over the global batch; k2 in the loss."""
    responses = [response for group in groups for response in group]
    centred = [r.reward - rewards_of(group).mean() + np.zeros(len(r)) for group in groups for r in group]
    terms = [
        surrogate(r.ratio, a, 0.2, 0.2) - 0.01 * (r.logprobs - r.ref_logprobs) ** 2 / 2
        for r, a in zip(responses, white(centred), strict=True)
    ]
    return -float(np.mean(np.concatenate(terms)))


def reinforce_ppb(groups: Sequence[Group]) -> float:
    """As Colossal-RL has it: the group's mean off, KL in the reward, whitened over the batch, responses weigh alike."""
    responses = [response for group in groups for response in group]
    centred = [r.reward - rewards_of(group).mean() - 0.01 * kl_to_go(r) for group in groups for r in group]
    means = [surrogate(r.ratio, a, 0.2, 0.2).mean() for r, a in zip(responses, white(centred), strict=True)]
    return -float(np.mean(means))
