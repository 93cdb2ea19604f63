"""Fork peers from a server that has imported all modules: importing torch takes seconds in each new process."""

import os
import signal
import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection

from coati_rl.transport import wire
from tests.unit.transport import peer

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])


class ForkedPeer:
    """peer.py in a process of its own, with the part of Popen's interface that the tests use."""

    def __init__(self, arguments: tuple[str, ...], group_prefix: str) -> None:
        from_test, to_peer = _CONTEXT.Pipe(duplex=False)
        from_peer, to_test = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(target=_run, args=(from_test, to_test, arguments, group_prefix), daemon=True)
        self._process.start()
        from_test.close()
        to_test.close()
        self.stdin = os.fdopen(os.dup(to_peer.fileno()), "w")
        self.stdout = os.fdopen(os.dup(from_peer.fileno()), "r")
        to_peer.close()
        from_peer.close()

    def send_signal(self, number: signal.Signals) -> None:
        if self._process.is_alive():
            assert self._process.pid is not None
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()

    def communicate(self) -> None:
        """Wait for its end and close its pipes."""
        self.wait()
        self.stdin.close()
        self.stdout.close()


def _run(from_test: Connection, to_test: Connection, arguments: tuple[str, ...], group_prefix: str) -> None:
    sys.stdin, sys.stdout = (
        os.fdopen(from_test.fileno(), closefd=False),
        os.fdopen(to_test.fileno(), "w", closefd=False),
    )
    token_hex = wire.token_hex
    wire.token_hex = lambda num_bytes: group_prefix + token_hex(num_bytes)
    peer.main([*arguments])
