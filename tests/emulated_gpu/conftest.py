"""Refuse to run without the emulator."""

import os

import pytest

if not os.environ.get("COATI_EMULATED_GPU_HOME"):
    raise pytest.UsageError("tests/emulated_gpu needs emulated GPUs: scripts/test.sh --emulated-gpu")
