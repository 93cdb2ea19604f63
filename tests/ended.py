"""Tell whether a process has ended."""

import psutil


def has_ended(process: int | psutil.Process) -> bool:
    """True once the process, or the one of this id, has ended, also while nobody has collected its exit code."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two looks
        return True
