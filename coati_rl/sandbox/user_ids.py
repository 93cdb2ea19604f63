"""Give each sandbox of root's a user id of its own: the kernel counts processes by user id, whatever else is apart.

The name of an abstract socket says that an id is taken. The kernel frees it with the process that holds the socket.
"""

import os
import socket
from contextlib import suppress

from coati_rl.errors import ConfigError

_FIRST, _NUM = 60_000, 5_000  # ids that Debian's policy (9.2.2) leaves to be given out on demand


def claim_user_id() -> tuple[int, socket.socket]:
    """Take an id that no other sandbox of this machine has.

    Returns: the id, and the socket that holds it until it is closed.
    Raises: ConfigError when all are taken.
    """
    for number in range(_NUM):
        user_id = _FIRST + (os.getpid() + number) % _NUM
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with suppress(OSError):
            claim.bind(f"\0coati-sandbox-user-{user_id}")
            return user_id, claim
        claim.close()
    raise ConfigError(f"no sandbox for code rewards: its user ids, {_FIRST} to {_FIRST + _NUM - 1}, are all taken")
