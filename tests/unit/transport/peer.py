"""Run the other end of a weight transfer in a separate process, to be killed or stopped by the tests.

    peer.py receive RENDEZVOUS MANIFEST TIMEOUT_S [DEVICE]  receives until it is killed
    peer.py send BACKEND DIRECTORY TIMEOUT_S                opens a group for one rank, announces and sends two
    peer.py join RENDEZVOUS MANIFEST TIMEOUT_S              sends its share of big_weights() until it is killed

It prints one line per event, for the test to wait for.
"""

import sys
from pathlib import Path

import torch

from coati_rl.transport.deadline import Deadline
from coati_rl.transport.group import join_group
from coati_rl.transport.manifest import WeightManifest, build_manifest
from coati_rl.transport.rendezvous import CollectiveBackend, Rendezvous
from coati_rl.transport.staging_memory import GpuMemory, HostMemory
from coati_rl.transport.wire import WeightSender, receive

CPU = torch.device("cpu")


def big_weights() -> list[tuple[str, torch.Tensor]]:
    """48 MiB: more than the sockets' buffers hold, so that a peer that does not read is noticed."""
    return [(f"layer{i}", torch.full((2 * 2**20,), float(i))) for i in range(6)]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def receive_for_ever(rendezvous: Rendezvous, manifest: WeightManifest, timeout_s: float, device: torch.device) -> None:
    group = join_group(rendezvous, rank=rendezvous.first_rank, device=device, deadline=Deadline(timeout_s))
    is_on_host = device.type == "cpu" or rendezvous.has_one_receiver
    memory = HostMemory(reader=device) if is_on_host else GpuMemory(device)
    while True:
        staged = receive(group, manifest, memory=memory, deadline=Deadline(timeout_s))
        assert {tensor.device for _, tensor in staged.tensors} == {CPU if is_on_host else device}
        say(staged.digest)


def send_twice(backend: CollectiveBackend, directory: Path, timeout_s: float) -> None:
    sender = WeightSender(backend=backend, directory=directory)
    (invitation,) = sender.open([1])
    say(invitation.to_json())
    weights = big_weights()
    manifest = build_manifest(weights, policy_version=1, bucket_bytes=2**19)
    say(manifest.to_json())
    for _ in range(2):
        say("sending")
        sender.send(manifest, weights, timeout_s=timeout_s)
        sys.stdin.readline()
    sender.close()


def send_share_for_ever(rendezvous: Rendezvous, manifest: WeightManifest, timeout_s: float) -> None:
    sender = WeightSender(backend=rendezvous.backend)
    sender.join(rendezvous)
    own = {entry.name for entry in manifest.entries if entry.sender == rendezvous.first_rank}
    while True:
        share = [(name, tensor) for name, tensor in big_weights() if name in own]
        say(sender.send(manifest, share, timeout_s=timeout_s))


def main(arguments: list[str]) -> None:
    """Act as the arguments say."""
    match arguments:
        case ["receive", rendezvous, manifest, timeout_s, *device]:
            announced = Rendezvous.from_json(rendezvous), WeightManifest.from_json(manifest)
            receive_for_ever(*announced, float(timeout_s), torch.device(*device or ["cpu"]))
        case ["send", ("gloo" | "shm" | "file") as backend, directory, timeout_s]:
            send_twice(backend, Path(directory), float(timeout_s))
        case ["join", rendezvous, manifest, timeout_s]:
            send_share_for_ever(Rendezvous.from_json(rendezvous), WeightManifest.from_json(manifest), float(timeout_s))


if __name__ == "__main__":
    main(sys.argv[1:])
