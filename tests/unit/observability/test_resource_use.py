"""Test that what a process and those below it take of a machine is measured, and drawn in the timeline."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from coati_rl.observability import timeline as timelines
from coati_rl.observability.resource_use import GIB, ResourceUse
from coati_rl.observability.timeline import Timeline
from coati_rl.observability.trace_file import write_trace

HOLDS = 96 * 2**20  # bytes
CHILD = f"""
import time
held = bytearray({HOLDS})
for at in range(0, len(held), 4096):
    held[at] = 1
print("held", flush=True)
while time.process_time() < 60:
    pass
"""
# In a process of its own, which has no other one below it.
PARENT = """
import subprocess, sys, time
from coati_rl.observability.resource_use import ResourceUse
use, alone = ResourceUse(has_descendants=True), ResourceUse(has_descendants=False)
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
assert child.stdout.readline() == "held\\n"
deadline = time.monotonic() + 60.0
while use.sample()["cores"] < 0.05:  # others may have the cores
    assert time.monotonic() < deadline
    time.sleep(0.2)
print(use.sample()["memory_gib"] - alone.sample()["memory_gib"])
child.kill()
child.wait()
print(use.sample()["memory_gib"] - alone.sample()["memory_gib"])
"""


def test_a_busy_process_below_counts_and_one_that_has_ended_does_not():
    ended = subprocess.run([sys.executable, "-c", PARENT, CHILD], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    both, alone = map(float, ended.stdout.split())
    assert both > 0.9 * HOLDS / GIB
    assert abs(alone) < 0.1 * HOLDS / GIB


def test_cpu_time_is_counted_once_and_since_the_last_sample():
    use = ResourceUse(has_descendants=False)
    begin, cpu_begin = time.perf_counter(), time.process_time()
    while time.process_time() - cpu_begin < 0.5:
        pass
    cores = use.sample()["cores"]
    assert cores * (time.perf_counter() - begin) == pytest.approx(0.5, abs=0.1)
    time.sleep(0.5)
    assert use.sample()["cores"] < 0.5 * max(cores, 0.5)


def test_the_trace_has_counters_of_each_process(tmp_path, monkeypatch):
    monkeypatch.setattr(timelines, "RESOURCE_INTERVAL_S", 0.0)
    timeline = Timeline(tmp_path / "timeline", "trainer-0")
    deadline = time.monotonic() + 60.0
    while '"C"' not in (path.read_text() if (path := tmp_path / "timeline" / "trainer-0.jsonl").exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    timeline.close()
    events = json.loads(write_trace(tmp_path).read_text())["traceEvents"]
    counters = [event for event in events if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"cores", "memory_gib"}
    assert all(event["args"].keys() == {event["name"]} and event["args"][event["name"]] >= 0 for event in counters)
    assert {event["pid"] for event in counters} == {1}


def failed_device():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    "torch",
    [
        SimpleNamespace(),  # another thread imports it
        SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False)),
        SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True, mem_get_info=failed_device)),
    ],
    ids=["half imported", "on the CPU", "failed device"],
)
def test_no_state_of_torch_ends_a_timeline(tmp_path, monkeypatch, torch):
    monkeypatch.setitem(sys.modules, "torch", torch)
    timeline = Timeline(tmp_path, "producer-0")
    with timeline.span("generate"):
        pass
    timeline.close()
    assert '"generate"' in (tmp_path / "producer-0.jsonl").read_text()
