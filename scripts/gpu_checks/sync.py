"""The weight wire between two processes: every digest equal, GB/s, and a receiver that dies or stalls is noticed.

In: a backend of `WeightSender` and devices. Out: figures. A transfer is timed from `send` until the receiver has said
that the staged bytes have the sender's digest, and set beside a plain copy of as many bytes in the same run.
"""

import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from coati_rl.errors import TransferError
from coati_rl.transport.manifest import WeightManifest, build_manifest
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.transport.wire import WeightSender
from gpu_checks.outcome import CheckError, Outcome

NUM_TENSORS = 32
START_S = 120.0  # a receiver's imports and its CUDA context, on a cold disk
# How much later than its deadline a failing transfer may come back: the group is closed first, and machines are busy.
SLACK_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncSettings:
    """What is sent, and from where to where."""

    backend: str
    device: str  # of the sender
    receiver_device: str
    receiver_environment: dict[str, str]
    num_bytes: int
    rounds: int
    timeout_s: float  # of a transfer to a receiver that is there


class Receiver:
    """`peer` in a process; a context, at whose end it is dead."""

    def __init__(
        self,
        settings: SyncSettings,
        invitation: Rendezvous,
        manifest: WeightManifest,
        *,
        when_gone: Callable[[], None],
    ) -> None:
        """`when_gone`: called by another thread when the process has ended, unless it is set to None before."""
        told = {
            "invitation": invitation.to_json(),
            "manifest": manifest.to_json(),
            "device": settings.receiver_device,
            "timeout_s": START_S + settings.timeout_s,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpu_checks.peer", json.dumps(told)],
            env=os.environ | settings.receiver_environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.when_gone: Callable[[], None] | None = when_gone
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> "Receiver":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait(timeout=SLACK_S)

    def digest(self, timeout_s: float) -> str:
        """Of the next update. Raises: CheckError if there is none in time."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise CheckError(f"the receiver has not confirmed an update within {timeout_s:g} s") from None
        if not line.startswith("received "):
            raise CheckError(f"the receiver: {line}")
        return line.split()[1]

    def _read(self) -> None:
        for line in self.process.stdout or ():
            if line.startswith(("received ", "failed ")):
                self._lines.put(line.strip())
            else:
                sys.stderr.write(line)  # NCCL's warnings
        self._lines.put("failed: its process has ended")
        self.process.wait()
        if self.when_gone is not None:
            self.when_gone()


def check_sync(settings: SyncSettings, outcome: Outcome) -> None:
    """Send updates and compare digests, then lose one receiver to SIGKILL and one to SIGSTOP."""
    weights = make_weights(settings.num_bytes, settings.device)
    manifest = build_manifest(weights, policy_version=1, bucket_bytes=min(2**26, settings.num_bytes // 16))
    sender = WeightSender(backend=cast(Any, settings.backend), device=torch.device(settings.device))
    outcome.figures["size_mib"] = manifest.total_bytes // 2**20
    try:
        with _connect(sender, settings, manifest, weights) as receiver:
            _measure(sender, receiver, settings, manifest, weights, outcome)
            outcome.figures["dead_receiver_noticed_s"] = _lose(
                sender, settings, manifest, weights, outcome, how=receiver.process.kill, what="was killed"
            )
        with _connect(sender, settings, manifest, weights) as receiver:  # a new group, after one that has failed
            outcome.figures["stalled_receiver_noticed_s"] = _lose(
                sender,
                settings,
                manifest,
                weights,
                outcome,
                how=lambda: receiver.process.send_signal(signal.SIGSTOP),
                what="was stopped",
            )
            outcome.figures["deadline_s"] = settings.timeout_s
    except TransferError as error:
        raise CheckError(str(error)) from error
    finally:
        sender.close()


def make_weights(num_bytes: int, device: str) -> list[tuple[str, torch.Tensor]]:
    """bfloat16 tensors of this many bytes together."""
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (num_bytes // 2 // NUM_TENSORS,)
    return [
        (f"layer{i}", torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16))
        for i in range(NUM_TENSORS)
    ]


def copy_seconds(weights: list[tuple[str, torch.Tensor]], target: torch.Tensor) -> float:
    """How long a plain copy of all tensors into a flat one takes."""
    synchronize(target.device)
    begin = time.perf_counter()
    for (_, tensor), part in zip(weights, target.chunk(NUM_TENSORS), strict=True):
        part.copy_(tensor)
    synchronize(target.device)
    return time.perf_counter() - begin


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU has nothing pending."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _connect(
    sender: WeightSender, settings: SyncSettings, manifest: WeightManifest, weights: list[tuple[str, torch.Tensor]]
) -> Receiver:
    """A receiver that has taken a first update, over which the group was connected."""
    (invitation,) = sender.open([1])
    receiver = Receiver(settings, invitation, manifest, when_gone=sender.cancel)
    try:
        sent = sender.send(manifest, weights, timeout_s=START_S)
        received = receiver.digest(settings.timeout_s)
    except BaseException as error:
        status = receiver.process.poll()
        receiver.__exit__()
        if status is not None:
            raise CheckError(f"the receiver's process ended with status {status}: {error}") from error
        raise
    receiver.when_gone = None  # from here on the wire itself has to notice
    if received != sent:
        raise CheckError(f"digest {sent} was sent, {received} received")
    return receiver


def _measure(
    sender: WeightSender,
    receiver: Receiver,
    settings: SyncSettings,
    manifest: WeightManifest,
    weights: list[tuple[str, torch.Tensor]],
    outcome: Outcome,
) -> None:
    """Rounds of a transfer and a copy; the weights differ in each."""
    target = torch.cat([tensor for _, tensor in weights])
    copy_seconds(weights, target)
    transfers, copies, digests = [], [], set()
    for _ in range(settings.rounds):
        weights[0][1].add_(1.0)
        synchronize(target.device)
        begin = time.perf_counter()
        sent = sender.send(manifest, weights, timeout_s=settings.timeout_s)
        received = receiver.digest(settings.timeout_s)
        transfers.append(time.perf_counter() - begin)
        copies.append(copy_seconds(weights, target))
        digests.add(sent)
        outcome.expect(received == sent, f"digest {sent} was sent, {received} received")
    outcome.expect(len(digests) == settings.rounds, f"{settings.rounds} updates had {len(digests)} digests")
    transfer_s, copy_s = statistics.median(transfers), statistics.median(copies)
    outcome.figures |= {
        "equal_digests": len(digests),
        "sync_s": transfer_s,
        "sync_gb_per_s": manifest.total_bytes / transfer_s / 1e9,
        "device_copy_gb_per_s": manifest.total_bytes / copy_s / 1e9,
        "sync_of_device_copy": copy_s / transfer_s,
    }


def _lose(
    sender: WeightSender,
    settings: SyncSettings,
    manifest: WeightManifest,
    weights: list[tuple[str, torch.Tensor]],
    outcome: Outcome,
    *,
    how: Callable[[], None],
    what: str,
) -> float | None:
    """Seconds until a transfer to a receiver that `how` has taken away fails."""
    how()
    begin = time.monotonic()
    try:
        sender.send(manifest, weights, timeout_s=settings.timeout_s)
    except TransferError as error:
        sys.stderr.write(f"a receiver {what}: {error}\n")
    else:
        outcome.problems.append(f"a transfer to a receiver that {what} ended well")
        return None
    seconds = time.monotonic() - begin
    limit_s = settings.timeout_s + SLACK_S
    outcome.expect(seconds < limit_s, f"that a receiver {what} was noticed after {seconds:.1f} s, not {limit_s:g}")
    return seconds
