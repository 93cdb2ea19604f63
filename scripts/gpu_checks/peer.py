"""The engine's end of the weight wire in a process of its own, to be killed or stopped by the check.

    python -m gpu_checks.peer '{"invitation": ..., "manifest": ..., "device": ..., "timeout_s": ...}'

It receives until it is killed or a transfer fails, and prints "received DIGEST" or "failed REASON" for each transfer.
"""

import json
import sys

import torch

from coati_rl.errors import TransferError
from coati_rl.runtime.process import die_with_parent
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.group import join_group
from coati_rl.transport.manifest import WeightManifest
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.transport.wire import receive


def say(line: str) -> None:
    """Tell the check."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def receive_for_ever(rendezvous: Rendezvous, manifest: WeightManifest, device: torch.device, timeout_s: float) -> None:
    """Until the sender leaves, or a transfer fails."""
    rank = rendezvous.first_rank
    group = join_group(rendezvous, rank=rank, device=device, deadline=Deadline(timeout_s))
    while True:
        # Nothing is kept: a receiver's memory is that of one update.
        say(f"received {receive(group, manifest, device=device, deadline=Deadline(timeout_s)).digest}")


if __name__ == "__main__":
    die_with_parent()
    told = json.loads(sys.argv[1])
    try:
        receive_for_ever(
            Rendezvous.from_json(told["invitation"]),
            WeightManifest.from_json(told["manifest"]),
            torch.device(told["device"]),
            told["timeout_s"],
        )
    except TransferError as error:
        say(f"failed {error}")
