"""Test the environment of a trainer's process."""

import os
import subprocess
import sys

import pytest

from coati_rl.config import Config
from consumer.environment import MMAP_THRESHOLD, memory_environment, trainer_environment

# Frees a large block, upon which glibc lays smaller ones into its heap by default; then every second one of 200.
FREES_EVERY_SECOND = f"""
import ctypes, re
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.free(libc.malloc(2**24))
blocks = [libc.malloc({2 * MMAP_THRESHOLD}) for _ in range(200)]
for block in blocks:
    ctypes.memset(block, 1, {2 * MMAP_THRESHOLD})
for block in blocks[::2]:
    libc.free(block)
print(re.findall(r"RssAnon:\\s+(\\d+) kB", open("/proc/self/status").read())[0])
"""


def private_memory(variables):
    """Bytes of a process's private memory after `FREES_EVERY_SECOND`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-I", "-c", FREES_EVERY_SECOND], env=environment | variables, capture_output=True, check=True
    )
    return 1024 * int(done.stdout)


def test_on_the_cpu_what_is_freed_between_other_allocations_goes_back_to_the_system():
    held = private_memory({}) - private_memory(memory_environment("cpu", "fsdp2"))
    assert held == pytest.approx(100 * 2 * MMAP_THRESHOLD, rel=0.1)


@pytest.mark.parametrize(
    ("device", "plugin", "is_set"), [("cpu", "fsdp2", True), ("cpu", "hybrid", False), ("cuda", "fsdp2", False)]
)
def test_only_fsdp2_on_the_cpu_pays_for_it(device, plugin, is_set):
    variables = trainer_environment(Config(plugin=plugin), device)
    assert ("MALLOC_MMAP_THRESHOLD_" in variables) == is_set
    assert variables["GLOO_SOCKET_IFNAME"] == "lo"
