"""What came in since the last optimizer step, and whether too much of it failed."""


class StepCounts:
    """Counts groups, and samples that failed or could not be scored."""

    def __init__(self, *, max_failed_samples: int, groups_filtered: int = 0, samples_failed: int = 0) -> None:
        """`groups_filtered` and `samples_failed`: `filtered()` of the run that is resumed."""
        self._max_failed_samples = max_failed_samples
        self._reset()
        self._groups_total = self._groups_filtered = groups_filtered
        self._samples_failed = self._samples_filtered = samples_failed

    def _reset(self) -> None:
        self._groups_total = 0
        self._groups_filtered = 0
        self._samples_failed = 0
        self._samples_filtered = 0  # failed samples of filtered groups

    def add_group(self, *, num_failed: int, is_filtered: bool) -> None:
        """A group of which `num_failed` samples are of no use; filtered when it is not trained at all."""
        self._groups_total += 1
        self._groups_filtered += is_filtered
        self._samples_failed += num_failed
        self._samples_filtered += num_failed if is_filtered else 0

    def filtered(self) -> dict[str, int]:
        """What a resumed run must not forget: these groups do not come again, all others since the last step do."""
        return {"groups_filtered": self._groups_filtered, "samples_failed": self._samples_filtered}

    def problem(self) -> str | None:
        """Why the run must stop, None while it may go on."""
        if self._samples_failed <= self._max_failed_samples:
            return None
        return (
            f"{self._samples_failed} samples of one step failed or could not be scored, "
            f"{self._max_failed_samples} are allowed (--max-failure-rate); the log names each"
        )

    def take(self) -> dict[str, int]:
        """The step is complete: its counts by their names in metrics.jsonl; counting starts anew."""
        counts = {
            "groups_total": self._groups_total,
            "groups_filtered": self._groups_filtered,
            "samples_failed": self._samples_failed,
        }
        self._reset()
        return counts
