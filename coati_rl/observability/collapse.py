"""Notice in the records of steps that a policy collapses, or that no response can count as correct.

Input: step records in order. Output: warnings for people, each once per event: a kind that was told is told again only
after it had ended. Lengths and entropy are compared with the run's first record, as short answers may be the task's.
"""

from collections.abc import Callable
from typing import Any

from coati_rl.text import count

_FEW_TOKENS = 4  # of the longest response, its end included
_SHORTER = 4.0  # times that the first record's mean response has to be longer than these
_LOW_ENTROPY = 0.02  # nats per token
_OF_THE_FIRST = 0.02  # share of the first record's entropy
_NUM_HOPELESS = 5  # first steps without a correct response
_REMEDY = (
    "see rollouts/ whether the reward pays for it, and go back to an earlier checkpoint (-m DIRECTORY) with a lower "
    "-lr, a higher -kl, or another reward"
)

Record = dict[str, Any]


class CollapseWatch:
    """Watch the records of a run with producers; other records lack what it reads, and give no warning.

    Args:
        threshold: the reward from which a response is correct, where one graded reward decides; None: it is not told.
    """

    def __init__(self, threshold: float | None = None) -> None:
        self._threshold = threshold
        self._first: Record = {}  # the first value of each key
        self._told: set[str] = set()
        self._num_hopeless = 0

    def warnings(self, record: Record) -> list[str]:
        """Take the next record. Returns: what it tells for the first time."""
        for key in ("response_tokens_mean", "entropy_mean"):
            if record.get(key) is not None:
                self._first.setdefault(key, record[key])
        kinds: tuple[Callable[[Record], str | None], ...] = (self._responses, self._entropy, self._correctness)
        return [warning for kind in kinds if (warning := self._once(kind.__name__, kind(record)))]

    def _once(self, kind: str, warning: str | None) -> str | None:
        """Return a warning that begins; None while it lasts. An empty one neither begins nor ends."""
        if warning is None:
            self._told.discard(kind)
        elif warning and kind not in self._told:
            self._told.add(kind)
            return warning
        return None

    def _responses(self, record: Record) -> str | None:
        longest, distinct = record.get("response_tokens_max"), record.get("distinct_response_fraction")
        if longest is None or distinct is None:
            return ""  # nothing came in
        number = round(record["num_response_tokens"] / max(record["response_tokens_mean"], 1e-9))
        step = f"step {record['step']}: the policy may have collapsed"
        if number > 1 and record["groups_total"] > 1 and round(distinct * number) == 1:
            tokens = count(longest, "token")
            return (
                f"{step}: all {number} responses of {record['groups_total']} prompts are the same, {tokens}; {_REMEDY}"
            )
        began_longer = self._first["response_tokens_mean"] >= _SHORTER * longest
        if longest <= 1 or (longest <= _FEW_TOKENS and began_longer):
            return f"{step}: no response is longer than {count(longest, 'token')}; {_REMEDY}"
        return None if longest > 2 * _FEW_TOKENS else ""

    def _entropy(self, record: Record) -> str | None:
        entropy, first = record.get("entropy_mean"), self._first.get("entropy_mean")
        if entropy is None or not first or "reward_mean" not in record:
            return ""
        limit = min(_LOW_ENTROPY, _OF_THE_FIRST * first)
        if entropy > 2 * limit:
            return None
        if entropy > limit:
            return ""
        return (
            f"step {record['step']}: the policy may have collapsed: its entropy is {entropy:.2g} nats per token, "
            f"{first:.2g} at the start, so that a prompt's samples hardly differ; {_REMEDY}"
        )

    def _correctness(self, record: Record) -> str | None:
        """Tell once that only the mean reward shows progress."""
        if self._threshold is None or record.get("answer_accuracy") is None:
            return ""
        is_hopeless = record["answer_accuracy"] == 0 and bool(record.get("reward_std"))
        self._num_hopeless = self._num_hopeless + 1 if is_hopeless else _NUM_HOPELESS + 1
        if self._num_hopeless != _NUM_HOPELESS:
            return ""
        return (
            f"nothing has reached --correct-from {self._threshold:g} in {_NUM_HOPELESS} steps, so that accuracy is 0; "
            f"the mean reward ({record['reward_mean']:.3g}) shows the progress, or set --correct-from"
        )
