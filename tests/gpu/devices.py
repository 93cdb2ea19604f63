"""Choose where the tests of this folder run: on the CPU in every suite, so that what a GPU will run has run; and on a
GPU.
"""

import pytest

on_cpu_and_gpu = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
