"""Test the checks of `coati-rl doctor` that start Ray, an engine's libraries or several processes."""

import time

import pytest

from coati_rl.doctor import command, gpu_processes, gpus
from coati_rl.doctor.machine_check import Result, run_checks
from coati_rl.errors import RunError
from consumer.proofs import device

pytestmark = pytest.mark.full


def test_this_machine_passes_every_check_within_a_minute(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/tmp")  # that of a test is too long for Ray's sockets
    started = time.monotonic()
    lines = [*run_checks(command.CHECKS)]
    assert [line for line in lines if line.result.status == "fail"] == []
    assert time.monotonic() - started < 60


def test_gradient__of_another_device_is_compared_with_the_cpus(monkeypatch):
    assert gpus.gradient("cpu") == Result(
        status="ok", evidence="the gradient of a packed row differs from the CPU's by 0.0e+00 (relative, float32)"
    )
    gradient, factors = device._gradient, iter((1.0, 1.01))
    monkeypatch.setattr(device, "_gradient", lambda *args: next(factors) * gradient(*args))
    assert gpus.gradient("cpu").status == "fail"


def test_ranks_sum_a_tensor_and_one_that_fails_is_told():
    gpu_processes.sum_over_ranks(2, backend="gloo")
    with pytest.raises(RunError, match="backend"):
        gpu_processes.sum_over_ranks(2, backend="no backend")
