"""The wire over CUDA IPC between two processes that share a GPU or have peer access."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coati_rl.transport.manifest import build_manifest
from coati_rl.transport.wire import WeightSender

ROOT = Path(__file__).parents[3]
RECEIVER = """
import sys, torch
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.group import join_group
from coati_rl.transport.manifest import WeightManifest
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.transport.wire import receive
invitation, manifest = Rendezvous.from_json(sys.argv[1]), WeightManifest.from_json(sys.argv[2])
device = torch.device("cuda", 0)
group = join_group(invitation, rank=1, device=device, deadline=Deadline(60.0))
for _ in range(4):
    staged = receive(group, manifest, device=device, deadline=Deadline(60.0))
    assert all(tensor.is_cuda for _, tensor in staged.tensors)
    sys.stdout.write(staged.digest + "\\n")
"""


@pytest.mark.gpu
def test_several_updates_by_turns_over_one_ipc_group():
    sender = WeightSender(backend="ipc", device=torch.device("cuda", 0))
    updates = [
        [(f"layer{i}", torch.randn(1000, 333, dtype=torch.bfloat16, device="cuda:0")) for i in range(50)]
        for _ in range(4)
    ]
    manifest = build_manifest(updates[0], policy_version=1, bucket_bytes=2**22)
    (invitation,) = sender.open([1])
    receiver = subprocess.Popen(
        [sys.executable, "-c", RECEIVER, invitation.to_json(), manifest.to_json()],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    digests = [sender.send(manifest, weights, timeout_s=60.0) for weights in updates]
    received, _ = receiver.communicate(timeout=60.0)
    sender.close()
    assert received.split() == digests
    assert len(set(digests)) == 4
