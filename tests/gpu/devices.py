"""Choose the devices of this folder's tests: the CPU in every suite, so that the code is always run, and a GPU."""

import pytest

on_cpu_and_gpu = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
