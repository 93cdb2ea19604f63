"""Show the record of an episode (docs/rollouts.md) as a table: who wrote which tokens, and how likely they were."""

from collections.abc import Iterator
from itertools import accumulate
from math import exp
from typing import Any, NamedTuple

Row = dict[str, Any]


class Part(NamedTuple):
    """Hold a run of tokens of one origin."""

    origin: str
    text: str
    num_tokens: int
    probability: float | None  # of all of its tokens, when they were sampled; None: they were not


def episode_parts(row: Row, tokenizer: Any) -> Iterator[Part]:
    """Yield the parts of an episode's last trajectory: the prompt, then answers and what answered them in turns.

    Args:
        row: a line of rollouts/, with tokens.
        tokenizer: of the model.
    """
    prompt, tokens, logprobs = row["prompt_token_ids"], row["token_ids"], row["rollout_logprobs"]
    yield Part("prompt", tokenizer.decode(prompt), len(prompt), None)
    runs = row.get("loss_mask") or [[True, len(tokens)]]
    ends = list(accumulate(length for _, length in runs))
    for (is_sampled, length), end in zip(runs, ends, strict=True):
        part = slice(end - length, end)
        text = tokenizer.decode(tokens[part])
        yield (
            Part("policy", text, length, exp(sum(logprobs[part])))
            if is_sampled
            else Part("environment", text, length, None)
        )


def episode_table(row: Row, tokenizer: Any) -> str:
    """Return the parts of an episode as a Markdown table, and its reward."""
    lines = ["| tokens | from | number | probability |", "|---|---|---|---|"]
    for part in episode_parts(row, tokenizer):
        text = part.text.replace("\n", "\\n").replace("|", "\\|")
        probability = "" if part.probability is None else f"{part.probability:.3f}"
        lines.append(f"| `{text}` | {part.origin} | {part.num_tokens} | {probability} |")
    return "\n".join([*lines, "", f"Step {row['step']}, reward {row['reward']:g}.", ""])
