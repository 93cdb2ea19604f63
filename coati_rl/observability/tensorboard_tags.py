"""Name the sections of TensorBoard: the tag of a metric is its section and its key, as in train/loss.

A key with a slash, such as eval/math/accuracy or reward/format, has a section of its own already.
"""

# Section -> keys that it holds, or how they begin where an underscore ends the text; the first that fits counts.
_SECTIONS = {
    "time": (
        *("time_s", "step_s", "train_s", "sync_s", "rollout_wait_s"),
        *("trainer_idle_fraction", "producer_idle_fraction"),
    ),
    "machine": ("cpu_busy_fraction", "memory_available_gib", "disk_free_gib"),
    "mismatch": ("logprob_", "old_logprob_"),
    "rollouts": (
        *(
            "reward_",
            "baseline_reward_",
            "answer_accuracy",
            "format_accuracy",
            "constant_group_fraction",
            "distinct_response_fraction",
        ),
        *("response_", "truncated_fraction", "turns_", "environment_s_mean", "model_s_mean", "over_length_"),
        *("groups_", "samples_failed", "samples_invalid", "samples_in_loss", "samples_computed", "staleness_"),
        *("num_prompt_tokens", "num_response_tokens"),
    ),
}
_OTHERS = "train"


def tag_of(key: str) -> str:
    """Return the tag under which TensorBoard shows a metric.

    Of a task's metrics, such as reward_mean/math, the section is that of the metric: rollouts/reward_mean/math.
    """
    name = key.partition("/")[0]
    for section, keys in _SECTIONS.items():
        if any(name == each or (each.endswith("_") and name.startswith(each)) for each in keys):
            return f"{section}/{key}"
    return key if "/" in key else f"{_OTHERS}/{key}"
