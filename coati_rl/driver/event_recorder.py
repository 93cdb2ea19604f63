"""Write what the events of the coordinator say to the files of a run, and show it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coati_rl.driver.host_metrics import host_metrics
from coati_rl.driver.loading import LoadingLines
from coati_rl.observability.progress import ProgressDisplay
from coati_rl.observability.records import evaluation_metrics
from coati_rl.observability.sampled_answer import AnswerReader
from coati_rl.observability.sinks import Sink

_OF_A_SYNC = ("producers", "seconds", "digest", "identity", "bytes", "commit_s", "probe_gap_mean", "probe_gap_max")


@dataclass(frozen=True, kw_only=True, slots=True)
class EventRecorder:
    """Hold what takes the events."""

    display: ProgressDisplay
    loading: LoadingLines
    sinks: Sequence[Sink]  # of steps; the first one is metrics.jsonl
    syncs: Sink
    answers: AnswerReader
    run_dir: Path

    def record(self, event: dict[str, Any]) -> None:
        """Write and show one event. Raises: RunError if a file cannot be written."""
        kind = event["event"]
        self.write(event | host_metrics(self.run_dir) if kind == "step" else event)
        if kind == "step" and (answer := self.answers.take(event["step"])) is not None:
            self.display.show_answer(answer)
            for sink in self.sinks:
                sink.write_answer(event["step"], answer)
        elif kind == "producer_joined" and (line := self.loading.producer_joined(event["producer"])):
            self.display.print_line(line)
        self.display.show(event)

    def write(self, event: dict[str, Any]) -> None:
        """Write the record of a step, an evaluation or a weight sync. Raises: RunError if a file cannot be written."""
        kind = event["event"]
        if kind == "step":
            for sink in self.sinks:
                sink.write(event["step"], {key: value for key, value in event.items() if key != "event"})
        elif kind == "evaluation":
            for sink in self.sinks[1:]:  # metrics.jsonl is one object per optimizer step; evaluations have their own
                sink.write(event["step"], evaluation_metrics({**event, **event.get("metrics", {})}))
        elif kind == "sync" and event["producers"]:  # else it failed, and is repeated
            version = event["policy_version"]
            self.syncs.write(version, {"step": version, **{name: event[name] for name in _OF_A_SYNC}})
