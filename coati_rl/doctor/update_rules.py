"""Tell by KL, gradients and losses whether updates change the policy too much, too little or not at all."""

from statistics import median

from coati_rl.doctor.rule import POOR, WRONG, Rules
from coati_rl.doctor.run_data import RunData, reward_change

_KL = 1.0  # nats per token
_TURMOIL = 0.3  # share of tokens that are clipped
_SMALL_CHANGE = 1e-6  # of a weight over a whole run
_CLIPPED, _TIMES = 0.9, 10.0  # share of steps, and norm over --max-grad-norm
RULES = Rules()


@RULES.add(
    WRONG,
    says="the learning rate is too high: updates destroy the policy",
    remedy="divide --learning-rate by ten, with --warmup-steps; go back to a checkpoint from before",
    leads_to="kl_explosion entropy_collapse entropy_explosion length_collapse length_growth repetition "
    "reward_falls reward_never_right groups_equal truncation samples_skipped gradient_clipped "
    "answer_format nothing_in_loss overfitting engine_mismatch stale_weights",
)
def learning_rate_too_high(run: RunData) -> str | None:
    """Look for an update that destroys the policy: numbers that are not finite, or a reward or loss that gets worse
    at once.

    With producers the reward falls to half within the first third of the steps, by two standard errors, and the policy
    changed much: KL above 1 nat per token, three of ten tokens clipped, or an entropy changed by three times. Of a job
    on a dataset the loss of the last steps is a tenth above the first ones', or some step's is twice the first one's.
    """
    rate = max((value for _, value in run.values("learning_rate")), default=0.0)
    for record in run.steps:
        if record.get("samples_in_loss", 1) and record.get("grad_norm", 0.0) is None:  # NaN is written as null
            return f"the gradient is not finite in step {record['step']} at a learning rate of {rate:.2g}"
    found = _destroyed_policy(run) if run.is_rl else _rising_loss(run)
    return found and f"{found}, at a learning rate of {rate:.2g}"


def _destroyed_policy(run: RunData) -> str | None:
    rewards = run.values("reward_mean")
    early, deviation, prompts = run.early("reward_mean"), run.early("reward_std"), run.early("groups_total")
    if len(rewards) < 4 or early is None:
        return None
    first = rewards[0][1]
    third = [value for _, value in rewards[1 : max(4, len(rewards) // 3 + 1)]]
    error = (deviation or 0.0) / (prompts or 1.0) ** 0.5
    if not (first > 0 and median(third) < 0.5 * first and first - median(third) > 2 * error):
        return None
    kl, clipped = (max((v for _, v in run.values(key)), default=0.0) for key in ("kl_mean", "clip_fraction"))
    entropies = [value for _, value in run.values("entropy_mean")]
    moved = max(entropies[: len(third) + 1]) / max(entropies[0], 1e-9) if entropies else 1.0
    if kl < _KL and clipped < _TURMOIL and 1 / 3 < moved < 3:
        return None
    if moved >= 3 and run.config.get("entropy_coeff"):  # the bonus explains it
        return None
    return (
        f"the reward fell from {first:.3g} in step {rewards[0][0]} to {median(third):.3g} in the steps after it; KL to "
        f"the start reaches {kl:.2g} nats per token, {clipped:.0%} of tokens are clipped"
    )


def _rising_loss(run: RunData) -> str | None:
    losses, early, late = run.values("loss"), run.early("loss"), run.late("loss")
    if early is None or late is None or losses[0][1] <= 0:  # of a loss without a lower bound of 0 it says nothing
        return None
    step, largest = max(losses, key=lambda each: each[1])
    if late < 1.1 * early and largest < 2 * losses[0][1]:
        return None
    return f"the loss was {early:.3g} in the first steps, {largest:.3g} in step {step} and {late:.3g} in the last"


@RULES.add(
    WRONG,
    says="the learning rate is too low for the weights to change",
    remedy="raise --learning-rate (1e-6 for a whole model, 1e-4 or more for adapters are usual)",
)
def learning_rate_too_low(run: RunData) -> str | None:
    """Multiply the peak learning rate by the number of steps: AdamW moves a weight by about the rate in a step.

    Weights of language models are some hundredths; a product below 1e-6 changes no digit that an answer depends on.
    --max-steps counts, else the steps so far, at least 50.
    The same digest of the weights in all syncs says so too, where gradients are not 0.
    """
    rates = run.values("learning_rate")
    planned = run.config.get("max_steps") or max(len(rates), 50)
    total = planned * (run.config.get("learning_rate") or max((value for _, value in rates), default=0.0))
    if len(rates) < 3:
        return None
    digests = {each.get("digest") for each in run.syncs}
    moves = max((value for _, value in run.values("grad_norm")), default=0.0) > 0
    is_still = len(run.syncs) > 3 and len(digests) == 1 and moves and len({each["step"] for each in run.syncs}) > 2
    if total >= _SMALL_CHANGE and not is_still:
        return None
    text = f"in {planned} steps a weight moves by about {total:.1e} at most"
    return text + (", and all syncs carried the same weights" if is_still else "")


@RULES.add(
    WRONG,
    says="no sample reaches the loss: steps change nothing",
    remedy="widen --filter-range (a group of g has a mean that is a multiple of 1/g where rewards are 0 or 1), or "
    "leave out --filter-truncated-response",
    leads_to="run_failed",
)
def nothing_in_loss(run: RunData) -> str | None:
    """Count steps without a sample in the loss: more than half of at least three, or so many that the run stopped."""
    counts = [each for each in run.steps if each.get("samples_in_loss") is not None and not each.get("update")]
    empty = [each["step"] for each in counts if each["samples_in_loss"] == 0]
    failure = run.log.failure or ""
    if "max-empty-batches" in failure:
        return failure
    if len(counts) < 3 or len(empty) * 2 <= len(counts):
        return None
    filters = {name: run.config.get(name) for name in ("filter_range", "filter_truncated_response")}
    given = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in filters.items() if value)
    return f"{len(empty)} of {len(counts)} steps have no sample in the loss, first step {empty[0]}" + (
        f", with {given}" if given else ""
    )


@RULES.add(
    POOR,
    says="the reference is another model than the policy begins with",
    remedy="leave out --reference-model, or give the model that the run begins with",
    leads_to="kl_explosion gradient_clipped",
)
def other_reference(run: RunData) -> str | None:
    """Look at KL to the reference, or the implicit rewards, in step 1 of a run that began there.

    Before the first update the policy is its reference, and both are 0 but for rounding.
    """
    if not run.steps or run.steps[0]["step"] != 1 or run.config.get("adapter"):
        return None
    first = run.steps[0]
    beta = run.config.get("beta") or 0.1
    distances = {
        "KL": first.get("kl_mean"),
        "the log-ratio of a chosen completion": _ratio(first.get("rewards/chosen"), beta, run),
    }
    for name, value in distances.items():
        if value is not None and abs(value) > (0.05 if name == "KL" else 1.0):
            return f"{name} is {value:.3g} nats in step 1, where policy and reference should be the same"
    return None


def _ratio(reward: float | None, beta: float, run: RunData) -> float | None:
    return None if reward is None or run.config.get("loss") in ("simpo", "orpo") else reward / beta


@RULES.add(
    POOR,
    says="the policy leaves its reference behind",
    remedy="raise --kl-coeff (or --kl-controller adaptive), lower --learning-rate; check what the reward pays for",
    leads_to="reward_falls gradient_clipped",
)
def kl_explosion(run: RunData) -> str | None:
    """Look whether KL to the reference is above 1 nat per token in the last steps; a healthy policy stays below 0.1."""
    late, early = run.late("kl_mean"), run.early("kl_mean")
    if late is None or late < _KL:
        return None
    return (
        f"KL to the reference was {early:.2g} nats per token in the first steps and is {late:.2g} in the last"
        f"{reward_change(run)}"
    )


@RULES.add(
    POOR,
    says="many samples are left out of the loss because their ratio is too large",
    remedy="lower --learning-rate, --n-behind or --updates-per-batch",
    leads_to="nothing_in_loss",
)
def samples_skipped(run: RunData) -> str | None:
    """Look whether a tenth of the samples in the loss is left out for a ratio above --skip-threshold."""
    skipped = sum(value for _, value in run.values("samples_skipped"))
    total = sum(value for _, value in run.values("samples_in_loss"))
    if not total or skipped < 0.1 * total:
        return None
    limit = run.config.get("skip_threshold")
    return f"{skipped:.0f} of {total:.0f} samples were left out for a ratio above --skip-threshold {limit}"


@RULES.add(
    POOR,
    says="the gradient is clipped to a small part of itself in each step",
    remedy="raise --max-grad-norm to about the usual norm, or find why the norm is large",
)
def gradient_clipped(run: RunData) -> str | None:
    """Look whether nine of ten gradients are above ten times --max-grad-norm: steps no longer depend on their size."""
    norms = [value for _, value in run.values("grad_norm")]
    limit = run.config.get("max_grad_norm")
    if len(norms) < 3 or not limit:
        return None
    clipped = sum(norm > _TIMES * limit for norm in norms)
    if clipped < _CLIPPED * len(norms):
        return None
    return (
        f"the gradient's norm is {median(norms):.3g} in the median step, and above {_TIMES:g} times --max-grad-norm "
        f"{limit:g} in {clipped} of {len(norms)} steps"
    )
