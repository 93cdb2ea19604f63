"""The record of an optimizer step: which keys it has, always all of them, and how it becomes a line for people."""

from typing import Any

METRIC_KEYS = (
    "step",
    "policy_version",
    "time_s",  # since the coordinator started
    "reward_mean",
    "answer_accuracy",
    "format_accuracy",
    "response_tokens_mean",
    "truncated_fraction",
    "groups_total",  # that came in since the last step
    "groups_filtered",
    "samples_failed",
    "samples_invalid",
    "loss",
    "kl_mean",  # nats per token, to the reference model; null without one
    "entropy_mean",  # nats per token
    "clip_fraction",
    "ratio_max",
    "grad_norm",  # before clipping
    "learning_rate",
    "staleness_mean",  # in weight syncs, over tokens
    "staleness_max",
    "logprob_gap_mean",  # |engine - trainer| in nats on tokens of the trainer's own version; null if there are none
    "logprob_gap_max",
    "num_prompt_tokens",
    "num_response_tokens",
    "rollout_wait_s",  # the trainers waited for rollouts
    "train_s",
    "sync_s",  # of the last weight sync before the step
)


def complete(record: dict[str, Any]) -> dict[str, Any]:
    """The record in the order of METRIC_KEYS, null where it has no value; other keys follow."""
    known = {key: record.get(key) for key in METRIC_KEYS}
    return known | {key: value for key, value in record.items() if key not in known}


def step_line(record: dict[str, Any], num_steps: int | None) -> str:
    """One line for the log."""
    gap = record["logprob_gap_mean"]
    return (
        f"step {record['step']}{f'/{num_steps}' if num_steps else ''}  reward {record['reward_mean']:.3f}  "
        f"accuracy {record['answer_accuracy']:.3f}  loss {record['loss']:+.4f}  {tokens_per_s(record):.0f} tok/s  "
        f"staleness {record['staleness_mean']:.2f}  gap {'-' if gap is None else f'{gap:.1e}'}"
    )


def tokens_per_s(record: dict[str, Any]) -> float:
    """Response tokens over the step's wall time as the trainers saw it."""
    seconds = (record["rollout_wait_s"] or 0) + (record["train_s"] or 0) + (record["sync_s"] or 0)
    return float(record["num_response_tokens"] / seconds) if seconds else 0.0
