"""Count the groups received since the last optimizer step, and stop a run with too many failures."""

import logging
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import ClassVar

from coati_rl.batching.episodes import has_logprobs
from coati_rl.batching.group_rules import NoEffect, has_usable_baseline, is_valid, reason_without_effect
from coati_rl.checkpoint.position import Position
from coati_rl.checkpoint.untrained_rollouts import UntrainedRollouts
from coati_rl.coordinator.settings import CoordinatorSettings
from coati_rl.types import MAX_REWARD, RolloutGroup, Score

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_REMEDIES = (
    "use other data or another model, more samples a prompt (-g) or a higher temperature (-temp), a wider "
    "--filter-range, longer responses (-mnt), or allow for more with --max-empty-batches"
)


class GroupCounts:
    """Classify and count each received group; called under the coordinator's lock."""

    KEPT: ClassVar = (
        "_without_effect",
        "_dropped",
        "_num_dropped",
        "_samples_failed",
        "_failed_in_dropped",
        "_num_kept",
        "_num_steps_at_once",
        "_causes",
        "_examples",
    )

    def __init__(self, settings: CoordinatorSettings, start: Position, untrained: UntrainedRollouts) -> None:
        self._settings = settings
        self._max_rate = Fraction(str(settings.max_failure_rate))  # exact: of 100 samples 29 are 0.29
        self._without_effect: Counter[NoEffect] = Counter()  # consecutive groups, over steps; a resumed run starts at 0
        self._reset()
        self._dropped += untrained.dropped
        self._num_dropped = start.groups_filtered
        self._failed_in_dropped = start.samples_failed
        self._samples_failed = start.samples_failed + untrained.samples_failed
        self._num_kept = len(untrained.finished)

    def _reset(self) -> None:
        self._dropped: list[RolloutGroup] = []
        self._num_dropped = 0  # these groups, prompts that failed, and groups dropped before the run was resumed
        self._samples_failed = 0  # or undecidable
        self._failed_in_dropped = 0  # of these, the ones of dropped groups
        self._num_kept = 0  # groups that came in for this step and later ones
        self._num_steps_at_once = 0  # whose groups came in together when the run was resumed
        self._causes: Counter[str] = Counter()  # of the failures, since the last step, by kind
        self._examples: dict[str, str] = {}  # the first of each kind

    def add(self, group: RolloutGroup) -> bool:
        """Count a scored group. Returns: True if it counts for a step, False if it is dropped."""
        reason = reason_without_effect(group, self._settings.batch.rules)
        is_dropped = reason == "undecidable" or (reason is not None and self._settings.dynamic_batching)
        if is_dropped:
            self._dropped.append(group)
        self._count(reason, num_failed=self._note_failures(group), is_dropped=is_dropped)
        return not is_dropped

    def expect(self, num_groups: int) -> None:
        """Allow for the failures of groups of several steps, which a resumed run takes up at once."""
        self._num_steps_at_once = -(-num_groups // self._settings.batch.prompts_per_step)

    def add_failed(self, num_samples: int, cause: str) -> None:
        """Count a prompt that could not be rolled out."""
        self._note_cause(cause, num_samples)
        self._count("undecidable", num_failed=num_samples, is_dropped=True)

    def dropped(self) -> dict[str, int]:
        """Return the numbers of groups dropped since the last step and of their failed samples."""
        return {"groups_filtered": self._num_dropped, "samples_failed": self._failed_in_dropped}

    @property
    def dropped_groups(self) -> Sequence[RolloutGroup]:
        """Return the dropped groups that were scored in this run, or stored in the checkpoint it was resumed from."""
        return self._dropped

    @property
    def failed_in_untrained(self) -> int:
        """Return the number of samples that failed since the last step in groups that were not dropped."""
        return self._samples_failed - self._failed_in_dropped

    def problem(self) -> str | None:
        """Return why the run must stop; None while it may continue."""
        allowed = self._max_failed_samples
        if self._samples_failed > allowed:
            return (
                f"{self._samples_failed} samples of one step failed or could not be scored, "
                f"{allowed} are allowed (--max-failure-rate){self._main_cause()}; the log names each"
            )
        limit = self._settings.max_empty_groups
        if self._without_effect.total() < limit:
            return None
        num_steps = limit // self._settings.batch.prompts_per_step
        return (
            f"{limit} groups in a row, {num_steps} optimizer step(s)' worth, had no sample to train: "
            f"{_named(self._without_effect)}{self._main_cause()}; {_REMEDIES}"
        )

    def nothing_trained(self, num_left: int) -> str:
        """Return why a run ends before its first step; `num_left` groups could have been trained."""
        rules = self._settings.batch.rules
        reasons = Counter(reason for group in self._dropped if (reason := reason_without_effect(group, rules)))
        reasons["undecidable"] += self._num_dropped - len(self._dropped)
        return (
            f"the data ended before one optimizer step was full: {self._num_dropped} groups had no sample to train "
            f"({_named(reasons)}{self._main_cause()}), and the other {num_left} are fewer than tbs * dp = "
            f"{self._settings.batch.prompts_per_step}; {_REMEDIES}"
        )

    def take(self, groups: Sequence[RolloutGroup]) -> tuple[dict[str, int], Sequence[RolloutGroup]]:
        """Take the counts for a step of these groups, and reset them.

        Returns: (counts by their names in metrics.jsonl, the groups dropped since the last step).
        """
        rules = self._settings.batch.rules
        num_empty = sum(reason_without_effect(group, rules) is not None for group in groups)
        counts = {
            "groups_total": len(groups) + self._num_dropped,
            "groups_filtered": num_empty + self._num_dropped,
            "samples_failed": self._samples_failed,
        }
        dropped = self._dropped
        self._reset()
        return counts, dropped

    def _note_failures(self, group: RolloutGroup) -> int:
        """Log why samples of the group could not be scored. Returns: their number."""
        failed = [index for index, valid in enumerate(is_valid(group)) if not valid]
        for index in failed:
            cause = _cause(group, index)
            self._note_cause(cause, 1)
            logger.warning("sample %d of prompt %s could not be scored: %s", index, group.prompt.uid, cause)
        return len(failed)

    def _note_cause(self, cause: str, num_samples: int) -> None:
        """Count a cause; causes that differ in numbers only count as one, shown by its first example."""
        kind = _NUMBER.sub("#", cause)
        self._examples.setdefault(kind, cause)
        self._causes[kind] += num_samples

    def _main_cause(self) -> str:
        """Return the most common cause of failures, as the end of a sentence; empty if nothing failed."""
        if not self._causes:
            return ""
        ((kind, count),) = self._causes.most_common(1)
        return f"; {count} samples failed because: {self._examples[kind]}"

    def _count(self, reason: NoEffect | None, *, num_failed: int, is_dropped: bool) -> None:
        self._samples_failed += num_failed
        if is_dropped:
            self._num_dropped += 1
            self._failed_in_dropped += num_failed
        else:
            self._num_kept += 1
        if self._without_effect.total() >= self._settings.max_empty_groups:
            return  # keep the reason to stop until the trainers receive it
        if reason is None:
            self._without_effect.clear()
        else:
            self._without_effect[reason] += 1

    @property
    def _max_failed_samples(self) -> int:
        """Return the limit for the samples of the step, or of all groups that came in, and scored dropped ones."""
        group_size = self._settings.sampling_plans["train"].group_size
        due = self._settings.batch.prompts_per_step * max(1, self._num_steps_at_once)
        num_samples = max(due, self._num_kept) * group_size
        num_samples += max(0, self._num_dropped * group_size - self._failed_in_dropped)
        return int(self._max_rate * num_samples)


def _cause(group: RolloutGroup, episode: int) -> str:
    """Return why an episode is not valid."""
    if group.baseline is not None and not has_usable_baseline(group):
        return f"the greedy answer to its prompt has no reward: {_cause_of_score(group.baseline.score)}"
    score = group.scores[episode]
    if score.verdict != "invalid" and not has_logprobs(group)[episode]:
        return "the engine's log-probability of a token is not finite"
    return _cause_of_score(score)


def _cause_of_score(score: Score) -> str:
    if score.verdict == "invalid":
        return score.detail or "no reason is given"
    if abs(score.reward) <= MAX_REWARD:
        return "an empty response"
    return f"a reward of {score.reward:g} exceeds the largest absolute value, {MAX_REWARD:g}"


def _named(reasons: Counter[NoEffect]) -> str:
    names = {"undecidable": "failed or undecidable", "out of range": "out of range otherwise"}
    return ", ".join(f"{count} {names.get(reason, reason)}" for reason, count in reasons.most_common() if count)
