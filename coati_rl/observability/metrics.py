"""The record of an optimizer step: which keys it has, always all of them, and how it becomes a line for people."""

from typing import Any

METRIC_KEYS = (
    "step",
    "policy_version",
    "time_s",  # since the coordinator started
    "reward_mean",  # as scored; this and what follows is over all groups that came in for the step, trained or not
    "answer_accuracy",  # as the means before and after it null without a valid sample
    "format_accuracy",
    "response_tokens_mean",
    "truncated_fraction",
    "over_length_penalty_mean",  # what length adds to the reward of a valid response; null when it is not punished
    "groups_total",  # the step's own and those dropped since the last one
    "groups_filtered",  # of these, the ones without a sample in the loss
    "samples_failed",
    "samples_invalid",
    "samples_in_loss",
    "samples_skipped",  # ratio above --skip-threshold
    "loss",  # this and other means over tokens are null for a step without samples
    "kl_mean",  # nats per token, to the reference model; null without one
    "entropy_mean",  # nats per token
    "clip_fraction",
    "ratio_max",
    "correction_mean",  # off-policy weight, mean over loss tokens
    "correction_dropped_fraction",  # share of tokens whose weight is 0
    "grad_norm",  # before clipping
    "learning_rate",
    "staleness_mean",  # in weight syncs, over tokens of the step's own groups
    "staleness_max",
    "logprob_gap_mean",  # |engine - trainer| in nats, each with the weights that sampled it; null if unknown
    "logprob_gap_max",
    "logprob_gap_tokens",  # over how many tokens these are
    "old_logprob_gap_mean",  # |old_logprobs - rollout_logprobs| in nats over all loss tokens; null where the rollout's
    "old_logprob_gap_max",  # stand in
    "num_prompt_tokens",  # of all groups that came in
    "num_response_tokens",
    "rollout_wait_s",  # the trainers waited for rollouts
    "train_s",
    "sync_s",  # of the last weight sync before the step
    "trainer_idle_fraction",  # of the time since the last record: the trainer waited for work or was in a weight sync
    "producer_idle_fraction",  # of the same: no prompt was generating or being scored; mean over producers
)


def complete(record: dict[str, Any]) -> dict[str, Any]:
    """The record in the order of METRIC_KEYS, null where it has no value; `reward/<name>` and other keys follow."""
    known = {key: record.get(key) for key in METRIC_KEYS}
    return known | {key: value for key, value in record.items() if key not in known}


def step_line(record: dict[str, Any], num_steps: int | None) -> str:
    """One line for the log."""

    def shown(key: str, form: str) -> str:
        return "-" if record[key] is None else format(record[key], form)

    return (
        f"step {record['step']}{f'/{num_steps}' if num_steps else ''}  reward {shown('reward_mean', '.3f')}  "
        f"accuracy {shown('answer_accuracy', '.3f')}  loss {shown('loss', '+.4f')}  {tokens_per_s(record):.0f} tok/s  "
        f"staleness {record['staleness_mean']:.2f}  gap {shown('logprob_gap_mean', '.1e')}"
    )


def tokens_per_s(record: dict[str, Any]) -> float:
    """Response tokens over the step's wall time as the trainers saw it."""
    seconds = (record["rollout_wait_s"] or 0) + (record["train_s"] or 0) + (record["sync_s"] or 0)
    return float(record["num_response_tokens"] / seconds) if seconds else 0.0
