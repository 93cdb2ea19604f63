"""The wire over cupy's NCCL between two processes; needs two GPUs, or one and a NCCL that takes two ranks on it."""

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
device = torch.device("cuda", torch.cuda.device_count() - 1)
group = join_group(invitation, rank=1, device=device, deadline=Deadline(60.0))
for _ in range(2):
    staged = receive(group, manifest, device=device, deadline=Deadline(60.0))
    assert all(tensor.device == device for _, tensor in staged.tensors)
    sys.stdout.write(staged.digest + "\\n")
"""


@pytest.mark.gpu
def test_two_updates_over_one_nccl_group():
    environment = {
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # NCCL 2.30 and later
        "PYTHONPATH": str(ROOT),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setenv("NCCL_HOSTID", "trainer")  # before 2.30, two ranks on a GPU must look like two hosts
        sender = WeightSender(backend="nccl", device=torch.device("cuda", 0))
        weights = [(f"layer{i}", torch.randn(1000, 333, dtype=torch.bfloat16, device="cuda:0")) for i in range(50)]
        manifest = build_manifest(weights, policy_version=1, bucket_bytes=2**22)
        (invitation,) = sender.open([1])
        receiver = subprocess.Popen(
            [sys.executable, "-c", RECEIVER, invitation.to_json(), manifest.to_json()],
            env={**os.environ, "NCCL_HOSTID": "engine"},
            stdout=subprocess.PIPE,
            text=True,
        )
        digests = [sender.send(manifest, weights, timeout_s=60.0) for _ in range(2)]
        received, _ = receiver.communicate(timeout=60.0)
        sender.close()
    assert received.split() == digests
