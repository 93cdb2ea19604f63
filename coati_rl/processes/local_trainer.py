"""Run one trainer in a process that `trainer_process` has started, with its rank, its parent and modules in argv.

The modules are imported at once, while the driver reads the job's data. The first line of its input is the invitation
to call the driver. It asks there for its job, reports its heartbeats and its end, and takes its work from the
coordinator, which is in the driver.
"""

import signal
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from typing import Any

from coati_rl.errors import CoatiError, RunError
from coati_rl.processes.calls import Caller
from coati_rl.processes.ending import end_with_parent
from coati_rl.processes.heartbeats import INTERVAL_S, own_heartbeat
from coati_rl.processes.imports import uncollected
from coati_rl.processes.interrupts import ending_signals


def main() -> None:
    """Train until the job is over."""
    rank, parent = int(sys.argv[1]), int(sys.argv[2])
    end_with_parent(parent)
    for number in ending_signals():
        signal.signal(number, signal.SIG_IGN)  # the driver's to handle
    with uncollected():
        for module in sys.argv[3:]:
            import_module(module)
    if not (invitation := sys.stdin.readline()):
        return  # the job does not begin
    registry = Caller(invitation, "registry")
    try:
        result: int | CoatiError = _train(rank, registry, Caller(invitation, "coordinator"))
    except CoatiError as error:
        result = error
    except Exception as error:  # noqa: BLE001  reported with its type, as of any actor
        sys.excepthook(type(error), error, error.__traceback__)  # into the log
        result = RunError(f"trainer-{rank} failed: {type(error).__name__}: {' '.join(str(error).split())}")
    registry.end(rank, result)


def _train(rank: int, registry: Any, coordinator: Any) -> int:
    job = registry.job(rank)
    threading.Thread(target=_beat, args=(rank, registry), name="heartbeat", daemon=True).start()
    trainer = job.trainer(
        rank,
        job.config,
        job.context,
        run_dir=job.run_dir,
        checkpoint_dir=job.checkpoint_dir,
        resume_dir=job.resume_dir,
    )
    if rank == 0:
        registry.open_rendezvous(trainer.open_rendezvous())
    trainer.start(registry.rendezvous())
    registry.started(rank)
    return int(trainer.run(coordinator, ""))


def _beat(rank: int, registry: Any) -> None:
    with suppress(OSError, EOFError):  # the driver has ended, and this process with it
        while True:
            registry.beat(rank, own_heartbeat())
            time.sleep(INTERVAL_S)
