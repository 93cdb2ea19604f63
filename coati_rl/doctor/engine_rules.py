"""Tell by log-probabilities whether engine and trainer compute, and sample from, the same policy."""

from math import sqrt
from statistics import mean, pstdev

from coati_rl.doctor.rule import WRONG, Rules
from coati_rl.doctor.run_data import RunData

_FLOAT32_GAP = 3e-4  # nats: three times what a run in fp32 accepts; honest ones are below 1e-4
_ROUNDINGS = 3.0  # times the trainer's own rounding in bfloat16; an honest engine's gap is 0.5 to 1.5 times it
_BFLOAT16_GAP = 1e-3  # nats: the least limit
_UNMEASURED_GAP = 0.05  # nats: in bfloat16, where the rounding was not measured, as the probe's
_WINDOW = 3  # steps that a gap of sampled tokens is a mean over
_GROWTH = 3.0  # times the first sync's gap
_MIN_SAMPLES = 32
_BIASES = ((2.0, 1.25), (5.0, 1.1))  # standard errors, and ratio of what was sampled to the trainer's entropy
RULES = Rules()


def gap_limit(run: RunData, *, of_probe: bool = False) -> float:
    """Return the largest gap in nats, mean over tokens, that rounding explains.

    In bfloat16 it depends on the tokens: the rounding that was measured is that of sampled ones, not of the probe's.
    """
    rounding = max((value for _, value in run.values("logprob_rounding_mean")), default=None)
    if rounding is not None and not of_probe:
        return max(_BFLOAT16_GAP, _ROUNDINGS * rounding)
    return _FLOAT32_GAP if rounding is None and run.config.get("precision") != "bf16" else _UNMEASURED_GAP


@RULES.add(
    WRONG,
    says="the engine samples with weights of an earlier version than it reports",
    remedy="look for a prefix or weight cache between engine and model (a patched engine, --engine-arg); run with "
    "--probe-interval 1 and --on-logprob-gap stop, and report it with logs/producer-0.log",
    leads_to="engine_mismatch samples_skipped reward_falls run_failed",
)
def stale_weights(run: RunData) -> str | None:
    """Compare the probe's gap at the first sync with later ones.

    The engine that agrees at first computes the model right; a later gap of more than three times that, and above what
    rounding explains, means that it answers with other weights than it was sent.
    """
    gaps = [(each["step"], each["probe_gap_mean"]) for each in run.syncs if each.get("probe_gap_mean") is not None]
    if run.log.failure and "stale weights" in run.log.failure:
        return run.log.failure
    if len(gaps) < 2:
        return None
    limit, (_, first), (step, largest) = gap_limit(run, of_probe=True), gaps[0], max(gaps[1:], key=lambda each: each[1])
    if first > limit or largest <= max(limit, _GROWTH * first):
        return None
    return (
        f"the probe agreed to {first:.2g} nats at the first sync, and is {largest:.2g} nats apart under version {step}"
    )


@RULES.add(
    WRONG,
    says="the engine samples at another temperature, or from a changed distribution, than the loss assumes",
    remedy="give --temperature, --top-p, --top-k and --min-p by flags alone, and remove sampling settings from the "
    "model's generation_config.json and from --engine-arg",
    leads_to="engine_mismatch samples_skipped truncation reward_falls answer_format run_failed",
)
def engine_temperature(run: RunData) -> str | None:
    """Compare -log p of the sampled tokens, by the engine, with the trainer's entropy at the same tokens.

    Both are means of the same quantity if the engine samples from the distribution that the loss assumes, whatever the
    model; noise has no bias. They differ by two standard errors over samples and a quarter, or by five and a tenth.
    Sampled tokens have to have a gap, while the probe, which knows no temperature, agrees.
    """
    gap, limit = _sampled_gap(run), gap_limit(run)
    probes = [each["probe_gap_mean"] for each in run.syncs if each.get("probe_gap_mean") is not None]
    if gap is None or gap[1] <= limit or not probes or max(probes) > gap_limit(run, of_probe=True):
        return None
    steps = {each.step for each in run.first_rollouts}
    entropies = [value for step, value in run.values("entropy_mean") if step in steps]
    entropy = mean(entropies) if entropies else None
    sampled = run.surprisals
    if not entropy or len(sampled) < _MIN_SAMPLES:
        return None
    tokens = sum(number for _, number in sampled)
    surprisal = sum(total for total, _ in sampled) / tokens
    error = pstdev(total - number * surprisal for total, number in sampled) * sqrt(len(sampled)) / tokens
    ratio = surprisal / entropy
    errors = abs(surprisal - entropy) / error if error else 0.0
    if not any(errors > number and max(ratio, 1 / ratio) > least for number, least in _BIASES):
        return None
    return (
        f"sampled tokens have -log p = {surprisal:.3g} +- {error:.1g} nats by the engine, where the trainer's entropy "
        f"of the same tokens is {entropy:.3g} at temperature {run.config.get('temperature')}: the engine samples "
        f"{'wider' if ratio > 1 else 'narrower'}; log-probabilities differ by {gap[1]:.2g} nats in step {gap[0]}"
    )


@RULES.add(
    WRONG,
    says="engine and trainer compute different log-probabilities from the same weights",
    remedy="try --precision fp32 to tell rounding from a fault, --backend transformers to tell the engine's model "
    "code from the weights, and without --engine-arg and --quantization; --on-logprob-gap tis corrects for it",
    leads_to="samples_skipped reward_falls run_failed",
)
def engine_mismatch(run: RunData) -> str | None:
    """Compare log-probabilities of engine and trainer for the same weights and tokens.

    In fp32 honest ones agree below 1e-4 nats in the mean (a run stops there), 3e-4 is taken as wrong; in bf16, for
    sampled tokens over three steps, three times the trainer's own rounding, for the probe 0.05 nats.
    """
    limit, of_probe, sampled = gap_limit(run), gap_limit(run, of_probe=True), _sampled_gap(run)
    probes = [(each["step"], each["probe_gap_mean"]) for each in run.syncs if each.get("probe_gap_mean") is not None]
    probe = max(probes, key=lambda each: each[1], default=None)
    found = []
    if probe is not None and probe[1] > of_probe:
        found.append(f"the probe is {probe[1]:.2g} nats (mean) apart under version {probe[0]} (limit {of_probe:.2g})")
    if sampled is not None and sampled[1] > limit:
        found.append(f"sampled tokens are {sampled[1]:.2g} nats (mean) apart at step {sampled[0]} (limit {limit:.2g})")
    if found:
        return " and ".join(found)
    failure = run.log.failure or ""
    return failure if "log-probabilities of" in failure else None


def _sampled_gap(run: RunData) -> tuple[int, float] | None:
    """Return the largest gap of sampled tokens, a mean over some steps in a row, and the last of the steps.

    None where the engine samples among some tokens only, and its log-probabilities are theirs alone.
    """
    if run.config.get("top_k") or (run.config.get("top_p") or 1.0) < 1 or run.config.get("min_p"):
        return None
    gaps = run.values("logprob_gap_mean")
    ends = range(min(_WINDOW, len(gaps)), len(gaps) + 1) if gaps else ()
    means = [(gaps[end - 1][0], mean(gap for _, gap in gaps[max(0, end - _WINDOW) : end])) for end in ends]
    return max(means, key=lambda each: each[1], default=None)
