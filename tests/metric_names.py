"""List the keys that a record of metrics.jsonl always has in a run with producers."""

# The contract that scripts and users rely on, and what the algorithms add.
CONTRACT = [
    "step", "policy_version", "time_s", "reward_mean", "answer_accuracy", "format_accuracy",
    "response_tokens_mean", "truncated_fraction", "groups_total", "groups_filtered", "loss", "kl_mean",
    "entropy_mean", "clip_fraction", "ratio_max", "grad_norm", "learning_rate", "staleness_mean",
    "staleness_max", "logprob_gap_mean", "logprob_gap_max", "num_prompt_tokens", "num_response_tokens",
    "rollout_wait_s", "train_s", "sync_s",
]  # fmt: skip
OURS = [
    "samples_failed", "samples_invalid", "samples_in_loss", "samples_skipped", "over_length_penalty_mean",
    "correction_mean", "correction_dropped_fraction", "old_logprob_gap_mean", "old_logprob_gap_max", "teacher_kl_mean",
    "step_s", "trainer_idle_fraction", "producer_idle_fraction", "logprob_gap_tokens", "samples_computed",
    "logprob_rounding_mean", "logprob_rounding_rms", "logprob_rounding_tokens", "logprob_shift_mean",
    "kl_coeff", "entropy_coeff", "masked_token_fraction",
    "reward_std", "constant_group_fraction", "groups_all_correct", "groups_all_wrong",
    "response_tokens_max", "distinct_response_fraction",
    "baseline_reward_mean",
]  # fmt: skip
ROLLOUT_RUN = frozenset({*CONTRACT, *OURS})
# Of each task in a run of several, `<key>/<task>`.
OF_A_TASK = frozenset({"reward_mean", "answer_accuracy", "response_tokens_mean", "truncated_fraction"})
