"""Shorten the record of an optimizer step to one line; docs/metrics.md describes the record."""

from typing import Any

# Key, name in the line, format; keys that a record lacks are left out.
_SHOWN = (
    ("update", "update", "d"),
    ("reward_mean", "reward", ".3f"),
    ("answer_accuracy", "accuracy", ".3f"),
    ("loss", "loss", "+.4f"),
    ("perplexity", "perplexity", ".3f"),
    ("tokens_per_s", "", ".0f"),
    ("staleness_mean", "staleness", ".2f"),
    ("logprob_gap_mean", "gap", ".1e"),
)


def step_line(record: dict[str, Any], num_steps: int | None) -> str:
    """Return one line for the log."""
    if record.get("update"):  # nothing came in for it
        record = {key: value for key, value in record.items() if value is not None}
    else:
        record = {**record, "tokens_per_s": tokens_per_s(record)}
    parts = [f"step {record['step']}{f'/{num_steps}' if num_steps else ''}"]
    for key, name, form in _SHOWN:
        if key in record:
            value = "-" if record[key] is None else format(record[key], form)
            parts.append(f"{name} {value}" if name else f"{value} tok/s")
    return "  ".join(parts)


def tokens_per_s(record: dict[str, Any]) -> float:
    """Return response tokens, or without rollouts the samples' tokens, over the wall time since the last step."""
    seconds = record.get("step_s")
    counts = (record.get(name) for name in ("num_response_tokens", "num_tokens", "loss_tokens"))
    num_tokens = next((count for count in counts if count is not None), 0)
    return float(num_tokens / seconds) if seconds else 0.0
