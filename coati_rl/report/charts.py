"""Say which figures of a run are drawn together, in which section of the page, and what each chart answers."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

LEARNING, HEALTH, TIME, OTHER = "learning", "health", "time", "other"
_MAX_SERIES = 6  # of one chart
_MAX_FIGURES = 24  # of evaluations, besides those above
_NOT_DRAWN = {"step", "samples", "time_s", "policy_version", "update"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Describe one chart; figures that a run does not have are left out of it."""

    section: str
    title: str
    keys: tuple[str, ...]  # of the records of steps
    evaluations: tuple[str, ...] = ()  # of the summaries of evaluations; drawn as points
    note: str = ""
    better: str = ""  # "up" or "down": its first, best and last values are in the summary


def _learning(title: str, *keys: str, evaluations: tuple[str, ...] = (), note: str = "", better: str = "") -> Chart:
    return Chart(section=LEARNING, title=title, keys=keys, evaluations=evaluations, note=note, better=better)


def _health(title: str, *keys: str, note: str) -> Chart:
    return Chart(section=HEALTH, title=title, keys=keys, note=note)


def _time(title: str, *keys: str, note: str = "") -> Chart:
    return Chart(section=TIME, title=title, keys=keys, note=note)


CHARTS = (
    _learning("Reward", "reward_mean", evaluations=("reward_mean",), note="mean of valid samples", better="up"),
    _learning("Accuracy", "answer_accuracy", evaluations=("accuracy",), note="share of right answers", better="up"),
    _learning("Format", "format_accuracy", note="share of answers in the asked form"),
    _learning("Loss", "loss", evaluations=("loss",), note="as minimised", better="down"),
    _learning("Perplexity", "perplexity", evaluations=("perplexity",), note="exp of the loss", better="down"),
    _learning(
        "Accuracy of pairs",
        "rewards/accuracies",
        "step_accuracy",
        evaluations=("rewards/accuracies", "step_accuracy"),
        note="share of pairs or steps judged right",
        better="up",
    ),
    _learning("Margin", "rewards/margins", evaluations=("rewards/margins",), note="chosen minus rejected", better="up"),
    _learning(
        "Rewards of pairs",
        "rewards/chosen",
        "rewards/rejected",
        evaluations=("rewards/chosen", "rewards/rejected"),
        note="implicit or of the model",
    ),
    _learning(
        "Log-probability of pairs",
        "logps/chosen",
        "logps/rejected",
        evaluations=("logps/chosen", "logps/rejected"),
        note="nats a completion",
    ),
    _learning("Gradient norm", "grad_norm", "value_grad_norm", note="before clipping"),
    _learning("Learning rate", "learning_rate"),
    _learning("KL", "kl_mean", "kl", "teacher_kl_mean", note="nats to the reference, or to the teacher"),
    _learning(
        "Entropy", "entropy_mean", evaluations=("entropy_mean",), note="nats a token; near 0: the policy has collapsed"
    ),
    _learning("Response length", "response_tokens_mean", "response_tokens_max", note="tokens: mean and longest"),
    _learning("Turns", "turns_mean", note="answers of the policy in an episode"),
    _learning("Critic", "explained_variance", note="explained variance; 1 is perfect, 0 no better than the mean"),
    _learning("Critic's loss", "value_loss"),
    _learning("Values and returns", "value_mean", "return_mean"),
    _health(
        "Engine/trainer gap",
        "logprob_gap_mean",
        "logprob_rounding_mean",
        note="nats; compare with rounding: more is a mismatch",
    ),
    _health("Largest gap", "logprob_gap_max", note="nats, of one token"),
    _health("Staleness", "staleness_mean", "staleness_max", note="weight syncs since a token was sampled"),
    _health("Clipped tokens", "clip_fraction", "value_clip_fraction", note="share without a gradient"),
    _health("Largest ratio", "ratio_max", note="present policy to old one"),
    _health("Equal groups", "constant_group_fraction", note="share whose rewards are all equal: they teach nothing"),
    _health("Different responses", "distinct_response_fraction", note="share; a fall is a collapse"),
    _health("Truncated", "truncated_fraction", note="share of responses that met the length limit"),
    _health("Samples lost", "samples_invalid", "samples_failed", note="without a verdict; could not be sampled"),
    _health("Groups left out", "groups_filtered", "groups_total", note="without a sample in the loss, of all"),
    _health("Off-policy correction", "correction_mean", "correction_dropped_fraction", note="weight; share at 0"),
    _time("Step", "step_s", "train_s", "rollout_wait_s", "sync_s", note="seconds: whole, train, wait, sync"),
    _time("Idle", "trainer_idle_fraction", "producer_idle_fraction", note="share of a step: trainers, producers"),
    _time("Speed", "tokens_per_s", note="response tokens a second, or tokens of the data"),
    _time("Episode", "environment_s_mean", "model_s_mean", note="seconds in the environment, in the engine"),
)


def charts_of(keys: Iterable[str], constants: Iterable[str], evaluations: Iterable[str]) -> list[dict[str, Any]]:
    """Return the charts of some figures as JSON: those above, then the others, of one name before the slash together.

    Args:
        keys: figures that some run has.
        constants: those of them that never differ; only charts above show them.
        evaluations: eval/SET/FIGURE.
    """
    found, still = set(keys), set(constants)
    figures = {name.split("/", 2)[-1] for name in evaluations}
    charts = [chart for chart in CHARTS if found.intersection(chart.keys) or figures.intersection(chart.evaluations)]
    drawn = {key for chart in charts for key in chart.keys} | _NOT_DRAWN
    groups: dict[str, list[str]] = {}
    for key in sorted(found - drawn - still):
        groups.setdefault(key.partition("/")[0], []).append(key)
    for name, members in groups.items():
        charts.append(Chart(section=OTHER, title=name, keys=tuple(members[:_MAX_SERIES]), note=_left_out(members)))
    for figure in sorted(figures - {each for chart in charts for each in chart.evaluations})[:_MAX_FIGURES]:
        charts.append(Chart(section=OTHER, title=f"Evaluation: {figure}", keys=(), evaluations=(figure,)))
    return [asdict(chart) | {"keys": [key for key in chart.keys if key in found]} for chart in charts]


def _left_out(members: list[str]) -> str:
    return f"{len(members) - _MAX_SERIES} of {len(members)} are not drawn" if len(members) > _MAX_SERIES else ""
