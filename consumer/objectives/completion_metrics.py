"""Report what the losses of chosen and rejected completions have in common: DPO and its kin, KTO."""

from collections.abc import Mapping

from consumer.objectives.objective import mean_of


def completion_metrics(sums: Mapping[str, float], *, num_chosen: str, num_rejected: str) -> dict[str, float | None]:
    """Return means over the step's chosen and rejected completions, under TRL's names; see docs/metrics.md.

    Args:
        sums: of the step: chosen_reward_sum, rejected_reward_sum, chosen_logprob_sum, rejected_logprob_sum (nats),
            entropy_sum (nats), num_tokens.
        num_chosen: name of the number of chosen completions.
        num_rejected: of the rejected ones.
    """
    chosen = mean_of(sums, "chosen_reward_sum", num_chosen)
    rejected = mean_of(sums, "rejected_reward_sum", num_rejected)
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": None if chosen is None or rejected is None else chosen - rejected,
        "logps/chosen": mean_of(sums, "chosen_logprob_sum", num_chosen),
        "logps/rejected": mean_of(sums, "rejected_logprob_sum", num_rejected),
        "entropy_mean": mean_of(sums, "entropy_sum"),
        "loss_tokens": int(sums["num_tokens"]),
    }
