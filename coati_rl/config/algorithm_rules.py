"""Check which parts of an algorithm are combined: contradictions are refused, oddities warned about."""

import math
from collections.abc import Iterator

from coati_rl.algorithms.advantage import GDPO, compares_samples
from coati_rl.config.algorithm import AlgorithmConfig
from coati_rl.config.config import Config
from coati_rl.config.fields import shown
from coati_rl.config.sampling import UNCUT

SEQUENCE_CLIP = 0.01  # sequence ratios are means of logs: beyond this no response is ever clipped


def algorithm_problems(config: Config) -> Iterator[str]:
    """Why the algorithm cannot be run, each with a remedy."""
    yield from _kl(config.algorithm)
    yield from _clipping(config.algorithm)
    yield from _off_policy(config.algorithm)
    yield from _filters(config)
    yield from _updates(config)


def algorithm_warnings(config: Config) -> Iterator[str]:
    """Return what can be run, and is hardly meant."""
    algorithm = config.algorithm
    eps = {"--clip-eps-low": algorithm.clip_eps_low, "--clip-eps-high": algorithm.clip_eps_high}
    wide = [f"{name} {value}" for name, value in eps.items() if value > SEQUENCE_CLIP]
    if algorithm.ratio_level == "sequence" and algorithm.policy_loss == "clip" and wide:
        yield (
            f"--ratio-level sequence with {' and '.join(wide)}: ratios of whole responses are geometric means, which "
            f"hardly leave 1 +- {SEQUENCE_CLIP}, so nothing will be clipped; GSPO uses 3e-4 and 4e-4"
        )
    if config.renormalises:
        # The ratio of a renormalised probability to one of a full softmax is biased.
        overridden = " in spite of --old-logprobs engine" if algorithm.old_logprobs == "engine" else ""
        flags = ", ".join(UNCUT)
        yield f"{flags}: engines renormalise what is left, so the trainer recomputes old_logprobs{overridden}"
    if algorithm.kl_place == "loss" and algorithm.kl_estimator == "k1":
        yield (
            "--kl-estimator k1 in the loss: the expectation of its gradient is 0, so it holds nothing back; "
            "use k2 or k3, or --kl-place reward"
        )
    if algorithm.dynamic_batching and algorithm.filter_range is None and not algorithm.filter_truncated_response:
        yield "--dynamic-batching has nothing to replace: give --filter-range or --filter-truncated-response"
    if algorithm.advantage_estimator == GDPO:
        if all(len(each.reward.weights) < 2 for each in config.by_task.values()):
            yield f"--advantage-estimator {GDPO}: with one reward it is group_norm; name several in -rt"
        elif not algorithm.whiten_advantages:
            yield (
                f"--advantage-estimator {GDPO} without --whiten-advantages: GDPO also brings the advantages of a step "
                "to mean 0 and deviation 1"
            )
    if algorithm.turn_advantages is not None and not config.environment.is_given:
        given = f"--turn-advantages {algorithm.turn_advantages:g}"
        yield f"{given} without --env, --tools or --agent-command: has no effect"
    if algorithm.reward_scale != 1 and not algorithm.soft_over_length_punishment:
        yield f"--reward-scale {algorithm.reward_scale:g} scales --soft-over-length-punishment, which is off"


def needs_group(config: Config) -> bool:
    """True if a sample is compared with others of its prompt."""
    return compares_samples(config.algorithm.advantage_estimator) and not config.distillation.distill_only


def _updates(config: Config) -> Iterator[str]:
    """Refuse a number of optimizer steps that would end a run between two updates of a batch."""
    num_updates, max_steps = config.algorithm.updates_per_batch, config.data.max_steps
    if max_steps is not None and (rest := max_steps % num_updates):
        nearest = [max_steps - rest, max_steps - rest + num_updates][rest == max_steps :]
        yield (
            f"--max-steps {max_steps} with --updates-per-batch {num_updates}: counts optimizer steps, and each batch "
            f"takes {num_updates}; use --max-steps {' or '.join(map(str, nearest))}"
        )


def _kl(algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.kl_place != "none" and algorithm.kl_coeff == 0:
        yield (
            f"--kl-place {algorithm.kl_place} with --kl-coeff 0: has no effect; give a -kl above 0, or --kl-place none"
        )
    if algorithm.kl_place == "none" and algorithm.kl_coeff > 0:
        yield f"--kl-coeff {algorithm.kl_coeff} with --kl-place none: give --kl-place loss or reward, or -kl 0"


def _clipping(algorithm: AlgorithmConfig) -> Iterator[str]:
    dual = algorithm.clip_dual
    if dual is not None and algorithm.policy_loss == "clip" and dual <= 1 + algorithm.clip_eps_high:
        yield (
            f"--clip-dual {dual} must be above 1 + --clip-eps-high = {1 + algorithm.clip_eps_high}: it bounds "
            "what the clip lets through; 3 is usual"
        )
    for flag, shape in (("--vespo-positive", algorithm.vespo_positive), ("--vespo-negative", algorithm.vespo_negative)):
        if min(shape) <= 0:
            yield f"{flag} {shown(shape)}: K and LAMBDA must be above 0; 2,3 and 3,2 are usual"
    low, high = algorithm.token_covariance
    if not low < high:
        yield f"--token-covariance {low:g},{high:g}: give two numbers in order, like 1,5"


def _off_policy(algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.off_policy_correction == "none":
        return
    bounds = algorithm.off_policy_low, algorithm.off_policy_high
    low, high = (bound if bound is not None else math.nan for bound in bounds)  # never None: presets fill them in
    if not low < high:
        yield f"--off-policy-low {low} must be below --off-policy-high {high}"
    elif not low <= 1 <= high:
        yield f"--off-policy-low {low}, --off-policy-high {high}: must enclose 1, the ratio of equal policies"


def _filters(config: Config) -> Iterator[str]:
    sampling, algorithm = config.sampling, config.algorithm
    if algorithm.filter_range is not None:
        low, high = algorithm.filter_range
        if not 0 <= low < high <= 1:
            yield f"--filter-range {low},{high}: mean scores lie in [0, 1]; give two of them in order, like 0,1"
        elif config.reward.has_binary_score and not any(
            low < right / sampling.num_generations < high for right in range(sampling.num_generations + 1)
        ):
            yield (
                f"--filter-range {low},{high} with -g {sampling.num_generations}: no group has such a mean score, as "
                f"they are multiples of 1/{sampling.num_generations}; use a wider range or a larger -g"
            )
    if algorithm.soft_over_length_punishment and (algorithm.cache_length or 0) > config.max_response_tokens:
        most = config.max_response_tokens
        limit = "--max-new-tokens" if most == sampling.max_new_tokens else "max-episode-tokens - mpt ="
        yield f"--cache-length {algorithm.cache_length} exceeds {limit} {most}; give less"
