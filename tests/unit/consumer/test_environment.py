"""Test the environment of a trainer's process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coati_rl.config import Config
from coati_rl.processes.actor_process import HUGE_PAGES
from consumer.environment import START_THRESHOLD, memory_environment, trainer_environment

# Frees a large block, upon which glibc lays smaller ones into its heap by default; then every second one of 200.
FREES_EVERY_SECOND = f"""
import ctypes, re
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.free(libc.malloc(2**24))
blocks = [libc.malloc({2 * START_THRESHOLD}) for _ in range(200)]
for block in blocks:
    ctypes.memset(block, 1, {2 * START_THRESHOLD})
for block in blocks[::2]:
    libc.free(block)
print(re.findall(r"RssAnon:\\s+(\\d+) kB", open("/proc/self/status").read())[0])
"""

# Writes 64 MiB of fresh memory, with which a page fault per 4 KiB makes 16,384 of them.
WRITES_64_MIB = """
import ctypes, resource
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype = ctypes.c_void_p
begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
ctypes.memset(libc.malloc(2**26), 1, 2**26)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin)
"""
# Writes 64 MiB in blocks of 1 MiB, frees them and does so again, in which page faults are counted.
WRITES_TWICE = """
import ctypes, resource
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def write():
    blocks = [libc.malloc(2**20) for _ in range(64)]
    for block in blocks:
        ctypes.memset(block, 1, 2**20)
    for block in blocks:
        libc.free(block)
write()
begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
write()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin)
"""
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def number_from(program, variables):
    """What a program prints in a process with these variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-I", "-c", program], env=environment | variables, capture_output=True)
    return int(done.stdout)


def private_memory(variables):
    """Bytes of a process's private memory after `FREES_EVERY_SECOND`."""
    return 1024 * number_from(FREES_EVERY_SECOND, variables)


@pytest.fixture(scope="module")
def plain_memory():
    return private_memory({})


def test_on_the_cpu_what_is_freed_between_other_allocations_goes_back_to_the_system(plain_memory):
    held = plain_memory - private_memory(memory_environment("cpu", "fsdp2"))
    assert held == pytest.approx(100 * 2 * START_THRESHOLD, rel=0.1)


def test_other_layouts_on_the_cpu_keep_it(plain_memory):
    assert private_memory(memory_environment("cpu", "hybrid")) == pytest.approx(plain_memory, rel=0.1)


def test_memory_for_the_next_micro_batch_is_kept_but_with_fsdp2():
    again = {plugin: number_from(WRITES_TWICE, memory_environment("cpu", plugin)) for plugin in ("hybrid", "fsdp2")}
    assert again["hybrid"] < 100
    assert again["fsdp2"] > 16_000


@pytest.mark.parametrize("plugin", ["hybrid", "fsdp2"])
def test_a_trainer_has_these_variables_on_the_cpu_alone(plugin):
    config, expected = Config(plugin=plugin), memory_environment("cpu", plugin)
    assert trainer_environment(config, "cpu") == {"GLOO_SOCKET_IFNAME": "lo"} | expected
    assert trainer_environment(config, "cuda") == {"GLOO_SOCKET_IFNAME": "lo"}


def test_trainers_that_share_their_device_return_what_they_free():
    in_turns = trainer_environment(Config(colocate=True, n_behind=0), "cpu")
    assert in_turns == {"GLOO_SOCKET_IFNAME": "lo"} | memory_environment("cpu", "fsdp2")


def test_huge_pages_spare_page_faults_where_the_system_leaves_them_to_programs():
    is_left_to_programs = THP.is_file() and "[madvise]" in THP.read_text()
    plain, huge = (number_from(WRITES_64_MIB, variables) for variables in ({}, HUGE_PAGES))
    assert (huge < plain / 10) == is_left_to_programs
