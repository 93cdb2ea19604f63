"""Test what a run notes of its machine."""

import json
from types import SimpleNamespace

from coati_rl import __version__
from coati_rl.processes import machine_record
from coati_rl.processes.machine_record import record_start


def test_each_start_adds_a_line_with_machine_and_versions(tmp_path):
    record_start(tmp_path)
    record_start(tmp_path)
    first, second = map(json.loads, (tmp_path / "machine.jsonl").read_text().splitlines())
    assert first["coati_rl"] == __version__ and first["packages"]["numpy"]
    assert first["cores"] >= 1 and first["memory_gib"] > 0 and first["cpu"]
    assert first | {"time": ""} == second | {"time": ""}


def test_gpus_are_named_by_the_driver(monkeypatch):
    def name_of(device, buffer, size):
        buffer.value = b"NVIDIA X"
        return device  # 0: no error

    monkeypatch.setattr(machine_record, "open_gpus", lambda: (SimpleNamespace(nvmlDeviceGetName=name_of), [0, 999]))
    assert machine_record.machine()["gpus"] == ["NVIDIA X", "unknown GPU"]
