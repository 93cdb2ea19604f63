"""Choose the devices of this folder's tests: the CPU in every suite, so that the code is always run, and a GPU."""

import os

import pytest

on_cpu_and_gpu = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


IS_EMULATED = bool(os.environ.get("COATI_EMULATED_GPU_HOME"))


def size_on(device: str) -> str:
    """Return the device whose sizes a test has: an emulated GPU is slower than the CPU."""
    return "cpu" if IS_EMULATED else device
