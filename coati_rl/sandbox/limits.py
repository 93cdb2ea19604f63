"""Define what a sandboxed program may use, and what became of it."""

import math
from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20
_MAX_ERROR = 1000  # bytes of error output that are looked at

# How a program ended: by itself ("exit", or "signal"), or at a limit. "starved": others had the cores for so long that
# nothing can be said of the program.
End = Literal["exit", "signal", "cpu", "wall", "memory", "processes", "starved"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of one run of a program; `cpu_s` and `memory_bytes` hold for the sum of its processes."""

    cpu_s: float = 10.0
    memory_bytes: int = 1024 * MIB  # address space of each process, and what all have of their own, swapped or not
    output_bytes: int = 16 * MIB  # of each of output, error output and returned value, and of any file
    disk_bytes: int = 64 * MIB  # of /tmp; of /dev/shm as much again
    num_files: int = 1000  # files and folders in each
    num_open_files: int = 64
    num_processes: int = 32  # threads count
    most_wall_s: float = math.inf  # an earlier end to `starved_s`

    @property
    def wall_s(self) -> float:
        """Time on the clock, less what the program spent waiting for a core."""
        return self.cpu_s + 1.0

    @property
    def starved_s(self) -> float:
        """Time on the clock, waiting included."""
        return min(5 * self.wall_s, self.most_wall_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Describe what became of a run."""

    end: End
    code: int  # exit code, or number of the signal
    cpu_s: float
    wall_s: float
    waited_s: float  # of it; for a core, while others had them
    output: bytes
    error_output: bytes
    returned: bytes  # JSON; empty if the function did not return

    def explain(self, limits: Limits) -> str:
        """Return how it ended, in words."""
        match self.end:
            case "exit":
                lines = self.error_output[-_MAX_ERROR:].decode(errors="replace").strip().splitlines()
                return f"exit code {self.code}{': ' + lines[-1] if lines and self.code else ''}"
            case "signal":
                return f"killed by signal {self.code}"
            case "cpu":
                return f"more than {limits.cpu_s:g} s of CPU time"
            case "wall":
                return f"no end after {limits.wall_s:g} s"
            case "memory":
                return f"more than {limits.memory_bytes // MIB} MiB of memory"
            case "processes":
                return f"more than {limits.num_processes} processes and threads"
            case "starved":
                return f"no end after {self.wall_s:.0f} s, {self.waited_s:.0f} s of which it waited for a core"
