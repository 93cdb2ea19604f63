"""Tell by lengths, repetitions and entropy whether the policy's responses go where they should not."""

from collections.abc import Sequence

from coati_rl.doctor.rule import POOR, WRONG, Rules
from coati_rl.doctor.run_data import RunData, reward_change, reward_error
from coati_rl.run_reader.rollout import RecordedRollout

_TRUNCATED = 0.3  # share of responses in the first steps
_SHORTER, _LONGER = 0.5, 2.0  # of the length in the first steps
_TOKENS = 6  # difference of mean lengths, at least
_LOW_ENTROPY, _SOLVED = 0.2, 0.9  # of that in the first steps; accuracy
_MORE_ENTROPY, _RANDOM_ENTROPY = 3.0, 1.0  # times that in the first steps; nats per token
_HIGH_ENTROPY = 2.0  # nats per token: the likeliest token has a seventh of the probability
_LOOPS = 0.3  # share of rollouts
_REPEATS, _LONGEST_PERIOD = 4, 12  # of a loop at the end of a response, tokens
_ON_LENGTH = "; read the best and the worst answers (coati-rl show RUN)"
RULES = Rules()


@RULES.add(
    WRONG,
    says="the temperature is so high that responses are noise",
    remedy="use --temperature 1.0 or less",
    leads_to="truncation reward_never_right answer_format groups_equal gradient_clipped repetition length_growth "
    "length_collapse nothing_in_loss engine_mismatch",
)
def temperature_too_high(run: RunData) -> str | None:
    """Look whether the policy samples with an entropy above 2 nats per token at a --temperature above 1.

    Trained policies have 0.1 to 1 nats on their own tasks. At 2 nats responses drift into noise and do not end; half of
    them are cut or have no valid format.
    """
    temperature, entropy = run.config.get("temperature") or 1.0, run.early("entropy_mean")
    if entropy is None and run.surprisals:  # no sample was computed; -log p of what was sampled has the same mean
        entropy = sum(total for total, _ in run.surprisals) / sum(number for _, number in run.surprisals)
    truncated, valid = run.early("truncated_fraction") or 0.0, run.early("format_accuracy")
    bad = max(truncated, 0.0 if valid is None else 1 - valid)
    if temperature <= 1.0 or entropy is None or entropy < _HIGH_ENTROPY or bad < 0.5:
        return None
    return (
        f"at --temperature {temperature:g} the entropy is {entropy:.2g} nats per token in the first steps, and "
        f"{truncated:.0%} of responses are cut"
    )


@RULES.add(
    WRONG,
    says="responses are cut before they end",
    remedy="raise --max-new-tokens; if the model does not stop by itself, check --chat-template and give --stop",
    leads_to="reward_never_right answer_format groups_equal nothing_in_loss length_collapse",
)
def truncation(run: RunData) -> str | None:
    """Look whether three of ten responses are cut at the limit from the first steps on.

    A cut response is scored without its answer. Where responses grow only later, `length_growth` is the cause.
    """
    early = run.early("truncated_fraction")
    if early is None or early < _TRUNCATED:
        return None
    late = run.late("truncated_fraction")
    return (
        f"{early:.0%} of responses are cut at --max-new-tokens {run.config.get('max_new_tokens')} in the first steps"
        + ("" if late is None else f", {late:.0%} in the last")
    )


@RULES.add(
    POOR,
    says="the policy becomes random",
    remedy="lower --entropy-coeff (or --entropy-coeff-max), then --learning-rate; raise --kl-coeff",
    leads_to="kl_explosion length_growth length_collapse repetition reward_falls groups_equal nothing_in_loss "
    "gradient_clipped",
)
def entropy_explosion(run: RunData) -> str | None:
    """Compare the entropy of the last steps with the first: three times as much, and above 1 nat per token.

    A policy that learns becomes surer; one that becomes random has an entropy bonus that outweighs its rewards, or
    updates that are noise. If it has no bonus, and the reward rises by four standard errors while responses grow, what
    they say does not matter to the reward, and `length_growth` is the cause.
    """
    early, late = run.early("entropy_mean"), run.late("entropy_mean")
    if not run.is_rl or early is None or late is None or late < max(_RANDOM_ENTROPY, _MORE_ENTROPY * early):
        return None
    has_bonus = bool(run.config.get("entropy_coeff")) or run.config.get("entropy_target") is not None
    if not has_bonus and _reward_rises(run) and length_growth(run) is not None:
        return None
    return (
        f"the entropy was {early:.2g} nats per token in the first steps and is {late:.2g} in the last, with "
        f"--entropy-coeff {run.config.get('entropy_coeff')}{reward_change(run)}"
    )


@RULES.add(
    POOR,
    says="responses become short: the reward, or the weight of samples, pays for it",
    remedy="check what the reward pays for, raise --kl-coeff, or use --loss-variation token_level" + _ON_LENGTH,
    leads_to="kl_explosion entropy_collapse groups_equal reward_falls nothing_in_loss",
)
def length_collapse(run: RunData) -> str | None:
    """Compare the mean response length of the last steps with the first: below half, and at least 6 tokens less."""
    lengths = _lengths(run)
    if lengths is None or lengths[1] > _SHORTER * lengths[0] or lengths[0] - lengths[1] < _TOKENS:
        return None
    return (
        f"responses had {lengths[0]:.1f} tokens in the first steps and have {lengths[1]:.1f} in the last"
        f"{reward_change(run)}"
    )


@RULES.add(
    POOR,
    says="responses become long until they are cut",
    remedy="check what the reward pays for; --soft-over-length-punishment makes length cost" + _ON_LENGTH,
    leads_to="kl_explosion entropy_collapse groups_equal reward_falls nothing_in_loss repetition",
)
def length_growth(run: RunData) -> str | None:
    """Compare the mean response length of the last steps with the first: twice as long and 6 tokens more, or three of
    ten more responses are cut.
    """
    lengths, early, late = _lengths(run), run.early("truncated_fraction"), run.late("truncated_fraction")
    if lengths is None or early is None or late is None:
        return None
    is_longer = lengths[1] >= _LONGER * lengths[0] and lengths[1] - lengths[0] >= _TOKENS
    if not is_longer and late - early < _TRUNCATED:
        return None
    return (
        f"responses had {lengths[0]:.1f} tokens in the first steps and have {lengths[1]:.1f} in the last; "
        f"{early:.0%} were cut, {late:.0%} are{reward_change(run)}"
    )


@RULES.add(
    POOR,
    says="responses end in loops",
    remedy="check what the reward pays for, raise --kl-coeff, lower --learning-rate" + _ON_LENGTH,
    leads_to="kl_explosion entropy_collapse groups_equal truncation reward_never_right",
)
def repetition(run: RunData) -> str | None:
    """Count responses that end in a loop: the last tokens are a pattern of up to 12 tokens, four times or more.

    Three of ten do in the last steps that are recorded; at least eight tokens have to be in the loop.
    """
    rollouts = run.last_rollouts
    looping = [each for each in rollouts if ends_in_loop(_tokens(each))]
    if len(rollouts) < 16 or len(looping) < _LOOPS * len(rollouts):
        return None
    where = f"up to step {rollouts[-1].step}"
    return f"{len(looping)} of {len(rollouts)} responses {where} end in a loop, such as one to {looping[-1].uid}"


@RULES.add(
    POOR,
    says="the policy has become sure before it is right: a prompt's samples hardly differ",
    remedy="add --entropy-coeff 0.01 or --clip-eps-high 0.28, lower --learning-rate, and go back to a checkpoint",
    leads_to="groups_equal kl_explosion reward_falls nothing_in_loss",
)
def entropy_collapse(run: RunData) -> str | None:
    """Compare the entropy of the last steps with the first, while the task is not solved.

    Below a fifth of it, and most groups with equal rewards or hardly a different response; with an accuracy above 0.9 a
    sure policy is what was wanted.
    """
    early, late = run.early("entropy_mean"), run.late("entropy_mean")
    equal, distinct = run.late("constant_group_fraction"), run.late("distinct_response_fraction")
    if not run.is_rl or early is None or late is None or late > _LOW_ENTROPY * early:
        return None
    if (run.late("answer_accuracy") or 0.0) > _SOLVED:
        return None
    if (equal or 0.0) < 0.7 and (1.0 if distinct is None else distinct * run.group_size) > 1.5:
        return None
    return (
        f"the entropy was {early:.2g} nats per token in the first steps and is {late:.2g} in the last; "
        f"{equal or 0:.0%} of groups have equal rewards"
    )


def ends_in_loop(tokens: Sequence[object]) -> bool:
    """Return True if a sequence ends in a pattern that is repeated."""
    for period in range(1, _LONGEST_PERIOD + 1):
        length = max(_REPEATS * period, 8)
        tail = tokens[-length:]
        if len(tail) == length and all(tail[i] == tail[i - period] for i in range(period, length)):
            return True
    return False


def _tokens(rollout: RecordedRollout) -> Sequence[object]:
    """Return the tokens of a response, but for its end; its characters where tokens were not recorded."""
    tokens: Sequence[object] | None = rollout.line.get("token_ids")
    if tokens is None:
        return rollout.response
    return tokens[:-1] if rollout.finish_reason == "stop" else tokens


def _reward_rises(run: RunData) -> bool:
    early, late, error = run.early("reward_mean"), run.late("reward_mean"), reward_error(run)
    return early is not None and late is not None and error is not None and late - early >= 4 * error


def _lengths(run: RunData) -> tuple[float, float] | None:
    early, late = run.early("response_tokens_mean"), run.late("response_tokens_mean")
    return None if early is None or late is None else (early, late)
