"""Refuse, in a run, sampling settings of other systems whose log-probabilities trainers do not compute."""

from typing import Any

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_OF_GENERATE = _PENALTIES[:1]
_REASON = (
    "changes the logits of tokens that came before, and trainers compute log-probabilities without that, so that they "
    "would train another distribution than the one that was sampled from; leave it out"
)


def penalty_refusal(flag: str, value: Any) -> str | None:
    """Return why a run has no such setting; None for a name that is no penalty's.

    Args:
        flag: as it was written: a flag, a key of a file or a field.
        value: that it was given, if it is known.
    """
    name = flag.lstrip("-").replace("-", "_").rpartition(".")[2]
    if name not in _PENALTIES:
        return None
    remedy = " (coati-rl generate has it)" if name in _OF_GENERATE else ""
    return f"{flag}{'' if value is None else f' {value}'}: {_REASON}{remedy}"
