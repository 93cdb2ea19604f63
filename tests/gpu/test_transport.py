"""Test updates to another process over the GPU transports, complete and lost ones."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from bench.weight_sync import nccl_environment

from coati_rl.errors import TransferError, TransferTimeoutError
from coati_rl.transport.manifest import WeightManifest, build_manifest
from coati_rl.transport.wire import WeightSender

ROOT = Path(__file__).parents[2]
PEER = ROOT / "tests" / "unit" / "transport" / "peer.py"
START_S = 120.0  # the other process's imports and its CUDA context, on a cold disk
TIMEOUT_S = 3.0
SLACK_S = 10.0

Named = list[tuple[str, torch.Tensor]]

ON_HOST = "nccl, staged on the host"
pytestmark = pytest.mark.parametrize(
    "backend",
    [
        pytest.param("gloo", marks=pytest.mark.full),
        *(pytest.param(name, marks=pytest.mark.gpu) for name in ("nccl", ON_HOST, "ipc")),
    ],
)


@pytest.fixture
def sender(backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightSender]:
    for name, value in nccl_environment(0).items():
        monkeypatch.setenv(name, value)
    name = "nccl" if backend == ON_HOST else backend
    sender = WeightSender(backend=name, device=torch.device("cuda", 0), stages_on_gpu=backend != ON_HOST)
    yield sender
    sender.close()


@pytest.fixture
def start_receiver(backend: str, sender: WeightSender) -> Iterator[Callable[[WeightManifest], subprocess.Popen[str]]]:
    """Manifest -> a process that receives such updates; ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(manifest: WeightManifest) -> subprocess.Popen[str]:
        (invitation,) = sender.open([1])
        last = f"cuda:{torch.cuda.device_count() - 1}"
        device = {"nccl": last, ON_HOST: last, "ipc": "cuda:0"}.get(backend, "cpu")
        command = [sys.executable, str(PEER), "receive", invitation.to_json(), manifest.to_json(), str(START_S), device]
        environment = {**os.environ, **nccl_environment(1), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def weights(backend: str) -> Named:
    """48 MiB."""
    device = "cpu" if backend == "gloo" else "cuda:0"
    return [(f"layer{i}", torch.randn(1024, 512, dtype=torch.bfloat16, device=device)) for i in range(48)]


def test_updates_by_turns_arrive_bit_for_bit_on_the_receivers_device(sender, start_receiver, backend) -> None:
    manifest = build_manifest(weights(backend), policy_version=1, bucket_bytes=2**22)
    receiver = start_receiver(manifest)
    digests = []
    for _ in range(4):  # memory is used by turns of two
        digests.append(sender.send(manifest, weights(backend), timeout_s=START_S))
        assert receiver.stdout.readline().strip() == digests[-1]
    assert len(set(digests)) == 4


def test_a_receiver_that_dies_or_stops_is_noticed_and_a_new_group_works(sender, start_receiver, backend) -> None:
    tensors = weights(backend)
    manifest = build_manifest(tensors, policy_version=1, bucket_bytes=2**22)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        receiver = start_receiver(manifest)
        sender.send(manifest, tensors, timeout_s=START_S)
        receiver.send_signal(number)
        begin = time.monotonic()
        with pytest.raises(TransferError, match=r"rank 0 of 2, .*(rank 1 died|not done within)") as caught:
            sender.send(manifest, tensors, timeout_s=TIMEOUT_S)
        seconds = time.monotonic() - begin
        if number == signal.SIGKILL:
            assert not isinstance(caught.value, TransferTimeoutError)
            assert seconds < SLACK_S
        else:
            assert isinstance(caught.value, TransferTimeoutError)
            assert TIMEOUT_S <= seconds < TIMEOUT_S + SLACK_S
