"""Tell by rewards and responses whether a run can learn from its rewards."""

import re
from collections import Counter
from collections.abc import Sequence
from statistics import median

from coati_rl.doctor.rule import POOR, WRONG, Rules
from coati_rl.doctor.run_data import RunData, reward_error
from coati_rl.text import shorten

_MIN_STEPS = 3  # before a rule about all steps says anything
_ALL_EQUAL = 0.9  # share of groups with equal rewards, median over steps
_ALWAYS = 0.98  # accuracy
_UNREAD = 0.1  # share of whole responses that hold the ground truth and do not count as formatted
_MAX_TRUTH = 50  # characters of a ground truth that is looked for
_NARROW = 1.5  # different responses of a group on average; 1: all are the same
_LOST = 0.02  # share of samples
_FROM_REWARD = "groups_equal nothing_in_loss reward_falls"
RULES = Rules()


@RULES.add(
    WRONG,
    says="the reward does not read the answers that the policy gives",
    remedy="choose the reward that reads them (--reward-type), or ask for its format in --system-prompt; try with "
    "coati-rl score --type TYPE on lines of rollouts/",
    leads_to=f"reward_never_right {_FROM_REWARD}",
)
def answer_format(run: RunData) -> str | None:
    """Count whole responses that hold the ground truth as a word of its own while hardly any has a valid format.

    The format is valid in at most a fifth of responses, and the truth stands in a tenth of those that were not cut: the
    policy answers, and the reward does not read it.
    """
    share = run.early("format_accuracy")
    whole = [each for each in run.first_rollouts if each.finish_reason == "stop" and 0 < len(each.truth) <= _MAX_TRUTH]
    if share is None or share > 0.2 or len(whole) < 16:
        return None
    holding = [each for each in whole if _holds(each.response, each.truth)]
    if len(holding) < _UNREAD * len(whole):
        return None
    example = holding[0]
    return (
        f"{len(holding)} of {len(whole)} whole responses hold the ground truth, and {share:.0%} have the format that "
        f"--reward-type {run.config.get('reward_type')} reads; such as {example.uid}: "
        f"{shorten(example.response)!r} for {shorten(example.truth, 20)!r}"
    )


@RULES.add(
    WRONG,
    says="samples are lost because generating or scoring them fails",
    remedy="repair what the detail names; try the reward alone with coati-rl score, raise --reward-timeout-s if it "
    "is a time limit, and read logs/producer-0.log and logs/coordinator.log",
    leads_to=f"run_failed {_FROM_REWARD}",
)
def samples_lost(run: RunData) -> str | None:
    """Look whether more than 2 % of samples could not be generated or have no verdict, or so many that the run stopped.

    Such a sample is not trained, and never counted as a zero. Their causes are in the rollouts and in the message.
    """
    if "--max-failure-rate" in (run.log.failure or ""):
        return run.log.failure
    lost = sum(max(each.get("samples_invalid") or 0, each.get("samples_failed") or 0) for each in run.steps)
    total = sum(value for _, value in run.values("groups_total")) * run.group_size
    if not total or lost <= _LOST * total:
        return None
    steps = [each["step"] for each in run.steps if each.get("samples_invalid") or each.get("samples_failed")]
    invalid = [each.detail for each in (*run.first_rollouts, *run.last_rollouts) if each.verdict == "invalid"]
    return (
        f"{lost} of {total:.0f} samples, in {len(steps)} of {run.num_steps} steps, first in step {steps[0]}"
        f"{_commonest(invalid)}"
    )


@RULES.add(
    WRONG,
    says="no response is ever right: nothing can be learned",
    remedy="look at what was answered (coati-rl show RUN), check --answer-key and the reward on a right answer "
    "(coati-rl score), or begin with easier prompts or a model that has been fine-tuned",
    leads_to=_FROM_REWARD,
)
def reward_never_right(run: RunData) -> str | None:
    """Look whether no response of the run is correct and rewards are equal in nine of ten groups, from three steps on.

    Hard tasks have a correct response now and then, and graded rewards differ; one that cannot be reached does not.
    """
    accuracies = [value for _, value in run.values("answer_accuracy")]
    if len(accuracies) < _MIN_STEPS or max(accuracies) > 0 or _equal_groups(run) < _ALL_EQUAL:
        return None
    samples = len(accuracies) * run.group_size
    detail = _commonest([each.detail for each in run.first_rollouts if each.verdict == "wrong" and each.detail])
    return (
        f"no response is correct in steps {run.steps[0]['step']} to {run.steps[-1]['step']} (at least {samples} "
        f"samples), {run.early('format_accuracy') or 0:.0%} have a valid format{detail}"
    )


@RULES.add(
    WRONG,
    says="nearly every response is right from the start: nothing is left to learn, or the reward pays for anything",
    remedy="check the reward on a wrong answer (coati-rl score); else use harder prompts, or leave out those that "
    "are always solved (--filter-range 0.01,0.99 --dynamic-batching)",
    leads_to=_FROM_REWARD,
)
def reward_always_right(run: RunData) -> str | None:
    """Look whether nearly all responses are correct from the first steps on.

    At an accuracy of 0.98 a group of eight has equal rewards in 85 % of cases, and there is nothing left to learn. Only
    the beginning counts: a run that ends there has learned it.
    """
    early, accuracies = run.early("answer_accuracy"), run.values("answer_accuracy")
    if early is None or len(accuracies) < _MIN_STEPS or early < _ALWAYS or _equal_groups(run) < _ALL_EQUAL:
        return None
    return f"accuracy is {early:.3f} in the first steps, and {_equal_groups(run):.0%} of groups have equal rewards"


@RULES.add(
    WRONG,
    says="the samples of a prompt are nearly the same, so that they cannot be compared",
    remedy="sample with --temperature 1.0, without --top-k and --min-p, and --top-p 1.0",
    leads_to=f"entropy_collapse repetition {_FROM_REWARD}",
)
def sampling_too_narrow(run: RunData) -> str | None:
    """Look whether the samples of a group are nearly all the same, where sampling is narrow by its settings.

    Different responses over all responses, times the group size, is the number of different ones of a group; up to 1.5
    nothing is compared. The settings are a temperature below 0.7, top-k up to 3, top-p below 0.5 or min-p above 0.5.
    """
    distinct, config = run.early("distinct_response_fraction"), run.config
    narrow = [
        f"--{name.replace('_', '-')} {config.get(name)}"
        for name, is_narrow in (
            ("temperature", (config.get("temperature") or 1.0) < 0.7),
            ("top_k", (config.get("top_k") or 1000) <= 3),
            ("top_p", (config.get("top_p") or 1.0) < 0.5),
            ("min_p", (config.get("min_p") or 0.0) > 0.5),
        )
        if is_narrow
    ]
    if distinct is None or not narrow or run.group_size < 2 or distinct * run.group_size > _NARROW:
        return None
    return (
        f"with {', '.join(narrow)} a prompt's {run.group_size} samples have {distinct * run.group_size:.1f} different "
        f"responses in the first steps, and {_equal_groups(run):.0%} of groups have equal rewards"
    )


@RULES.add(
    POOR,
    says="nearly all groups have equal rewards, which teach nothing",
    remedy="use prompts that are solved sometimes; larger groups (--num-generations), or "
    "--filter-range 0.01,0.99 --dynamic-batching, which replaces such groups",
    leads_to="nothing_in_loss",
)
def groups_equal(run: RunData) -> str | None:
    """Look whether nine of ten groups have equal rewards in the median step, from three steps on.

    Such groups have advantages of 0 by all group-relative estimators: a tenth of the samples is paid for by all.
    """
    shares = run.values("constant_group_fraction")
    if len(shares) < _MIN_STEPS or _equal_groups(run) < _ALL_EQUAL:
        return None
    right = sum(value > 0.5 for _, value in run.values("answer_accuracy"))
    return (
        f"{_equal_groups(run):.0%} of groups have equal rewards in the median of {len(shares)} steps; accuracy is "
        f"above 0.5 in {right} of them"
    )


@RULES.add(
    POOR,
    says="the reward falls",
    remedy="go back to an earlier checkpoint with a lower --learning-rate or a higher --kl-coeff",
)
def reward_falls(run: RunData) -> str | None:
    """Compare the mean reward of the last steps with the first.

    It has fallen below 0.7 times, and by four standard errors of a step's prompts: not by chance.
    """
    early, late, error = run.early("reward_mean"), run.late("reward_mean"), reward_error(run)
    if early is None or late is None or error is None or early <= 0:
        return None
    if late >= 0.7 * early or early - late < 4 * error:
        return None
    return f"the mean reward was {early:.3g} in the first steps and is {late:.3g} in the last"


def _equal_groups(run: RunData) -> float:
    shares = [value for _, value in run.values("constant_group_fraction")]
    return median(shares) if shares else 0.0


def _holds(text: str, word: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(word)}(?!\w|\.\d)", text) is not None


def _commonest(details: Sequence[str]) -> str:
    if not details:
        return ""
    (detail, number), *_ = Counter(details).most_common(1)
    return f"; most often ({number} of {len(details)}): {shorten(detail, 120)!r}"
