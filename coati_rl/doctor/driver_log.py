"""Read logs/driver.log: the times of steps by the wall clock, lost producers, and how the run ended."""

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_MAX_BYTES = 64 * 2**20
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (\w+) [\w.]+: (.*)")
_STEP = re.compile(r"step (\d+)(?:/\d+)?  ")
_STARTED, _SUMMARY = "run directory ", "minutes: "  # of a run, or its resumption, and of its end, however it ends
_FAILED, _INTERRUPTED = "the run failed: ", "interrupted"


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverLog:
    """Hold what a driver has logged since the run began or was resumed last."""

    step_times: tuple[tuple[int, float], ...] = ()  # step, seconds since the epoch
    lost: tuple[str, ...] = ()  # "producer 0 lost: ..."
    failure: str | None = None  # why the run ended, if it failed
    has_ended: bool | None = None  # None: there is no log


NO_LOG = DriverLog()


def read_driver_log(path: Path) -> DriverLog:
    """Read the log; one of more than 64 MiB from the end."""
    if not path.is_file():
        return NO_LOG
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _MAX_BYTES))
        lines = file.read(_MAX_BYTES).decode("utf-8", errors="replace").split("\n")
    step_times: list[tuple[int, float]] = []
    lost: list[str] = []
    failure, has_ended = None, False
    for found in filter(None, map(_LINE.match, lines)):
        time, _, text = found.groups()
        if text.startswith(_STARTED):
            step_times, lost, failure, has_ended = [], [], None, False
        elif step := _STEP.match(text):
            at = datetime.fromisoformat(time.replace(",", "."))
            if step_times and at.timestamp() < step_times[-1][1]:
                at = at.replace(fold=1)  # the hour comes twice when daylight saving time ends
            step_times.append((int(step[1]), at.timestamp()))
        elif re.match(r"producer \d+ lost: ", text):
            lost.append(text)
        elif text.startswith((_SUMMARY, _INTERRUPTED)):
            has_ended = True
        elif text.startswith(_FAILED):
            failure, has_ended = text.removeprefix(_FAILED), True
    return DriverLog(step_times=tuple(step_times), lost=tuple(lost), failure=failure, has_ended=has_ended)
