"""Allocate the memory of a file before it is mapped: a page that is missing later would be a SIGBUS, not an error."""

import os
import time
from errno import ENOSPC

from coati_rl.transport.deadline import Deadline

_STEP_BYTES = 64 * 2**20  # allocated between two checks of the deadline
_ROOM_S = 30.0  # for which others may fill a file system that is large enough
_LOOK_S = 0.2


def allocate(descriptor: int, num_bytes: int, *, deadline: Deadline, what: str) -> None:
    """Allocate a file's first bytes; wait some time for room that other files take.

    Raises: TransferError at the deadline, or when it is cancelled; OSError if there is no room.
    """
    file_system = os.fstatvfs(descriptor)
    if num_bytes > file_system.f_blocks * file_system.f_frsize > 0:  # 0: has no limit
        raise OSError(ENOSPC, os.strerror(ENOSPC))
    end = time.monotonic() + min(_ROOM_S, deadline.remaining_s() / 2)
    for offset in range(0, num_bytes, _STEP_BYTES):
        while True:
            deadline.check(what)
            try:
                os.posix_fallocate(descriptor, offset, min(_STEP_BYTES, num_bytes - offset))
                break
            except OSError as error:
                if error.errno != ENOSPC or time.monotonic() > end:
                    raise
                time.sleep(_LOOK_S)
