"""Write the line that a person reads for an event of the coordinator; what goes as planned has none."""

from typing import Any

from coati_rl.text import count

_NOTED = 5e-4  # difference of two figures that are shown with three digits


def event_line(event: dict[str, Any]) -> str | None:
    """Return the line of an event other than a step."""
    kind = event["event"]
    if kind == "evaluation" and "metrics" in event:
        metrics = event["metrics"].items()
        numbers = [f"{name} {'-' if value is None else format(value, '.4g')}" for name, value in metrics]
        return f"step {event['step']}: {event['task']} {'  '.join(numbers)}"
    if kind == "evaluation":
        return f"step {event['step']}: {event['task']} {_accuracy(event)}"
    if kind == "checkpoint":
        return f"step {event['step']}: checkpoint {event['path']}"
    if kind == "best":
        return f"step {event['step']}: the best checkpoint, {event['metric']} {event['value']:.3f}"
    if kind == "producer_lost":
        reissued = event["prompts_reissued"]
        return f"producer {event['producer']} lost: {event['cause']}; {reissued} prompts reissued"
    if kind == "producer_left":
        return f"producer {event['producer']} has left: {event['cause']}"  # it gave its prompts back before
    if kind == "coordinator_replaced":
        return f"the coordinator was lost; another goes on from the ledger, with {event['num_leased']} prompts leased"
    if kind == "sync" and event["problem"]:
        return f"weight sync to version {event['policy_version']} failed and is repeated: {event['problem']}"
    if kind == "gap":
        return f"warning: {event['cause']}"
    if kind == "rollout_failed":
        return f"prompt {event['uid']} failed: {event['cause']}"
    if kind == "finished" and event["groups_dropped"]:
        filtered = f" ({event['groups_filtered']} more were filtered)" if event["groups_filtered"] else ""
        return f"{event['groups_dropped']} prompts at the end did not fill a step: dropped{filtered}"
    return None


def _accuracy(summary: dict[str, Any]) -> str:
    """Return the figures of an evaluation with how it was sampled: accuracy, pass@k of the largest k, mean reward."""
    num_samples = summary.get("num_samples")
    shown = {"accuracy": summary["accuracy"], "pass": summary.get(f"pass@{num_samples}"), "reward": _graded(summary)}
    names = {"pass": f"pass@{num_samples}"}
    text = ", ".join(f"{names.get(key, key)} {value:.3f}" for key, value in shown.items() if value is not None)
    text += " (greedy)" if num_samples is None else _sampled(num_samples, summary["temperature"])
    return text + _out_of_reach(summary)


def _graded(summary: dict[str, Any]) -> float | None:
    """Return the mean reward; None where it says what the accuracy says, as of rewards 1 and 0."""
    reward, is_whole = summary.get("reward_mean"), not summary.get("num_failed") and not summary.get("num_invalid")
    if reward is None or not (is_whole or "correct_from" in summary):
        return None
    return float(reward) if abs(reward - summary["accuracy"]) >= _NOTED else None


def _sampled(num_samples: int, temperature: float) -> str:
    return f" ({count(num_samples, 'sample')} at temperature {temperature:g})"


def _out_of_reach(summary: dict[str, Any]) -> str:
    """Say that graded rewards are all too small to count as correct; nothing if they are all the same, as of a 0."""
    needed, largest = summary.get("correct_from"), summary.get("reward_max")
    if needed is None or largest is None or largest >= needed or summary["accuracy"] > 0:
        return ""
    if largest <= 0 and largest == summary["reward_mean"]:
        return ""
    return f"; nothing reaches --correct-from {needed:g}: the largest reward is {largest:.3g}"
