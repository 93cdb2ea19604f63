"""Keep a process from its core, as a busy machine does."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def others_on_the_core_of(pid: int, count: int) -> Iterator[None]:
    """Keep a process on one core, on which so many others compute in the meantime."""
    cores = os.sched_getaffinity(0)
    core = min(cores)
    os.sched_setaffinity(pid, {core})
    burn = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    burners = [subprocess.Popen([sys.executable, "-S", "-c", burn], stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for burner in burners:
            assert burner.stdout is not None
            burner.stdout.readline()
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.communicate()
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(pid, cores)


@contextmanager
def another_first_on_the_core_of(pid: int) -> Iterator[None]:
    """Let another process compute first on a process's core: that one has a slice, then a long wait, in turn.

    A priority counts within a session, where the kernel groups processes by these.
    """
    group = Path(f"/proc/{pid}/autogroup")
    is_in_another = os.getsid(pid) != os.getsid(0) and group.exists()
    os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    if is_in_another:
        group.write_text("19")
    try:
        with others_on_the_core_of(pid, 1):
            yield
    finally:
        with suppress(ProcessLookupError, PermissionError):  # it has ended; only root may raise a priority
            os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
            if is_in_another:
                group.write_text("0")
