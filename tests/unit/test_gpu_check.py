"""scripts/gpu_check.py as a program: arguments, exit status, table, and what it plans for which machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gpu_check
import pytest
from gpu_checks.peaks import dense_bf16_peak
from gpu_checks.plan import PACKED_LENGTHS, Job, Machine, nccl_environment, plan
from gpu_checks.runner import Row

ROOT = Path(__file__).parents[2]
H200 = {"name": "NVIDIA H200", "memory_bytes": 140 * 2**30}


def machine(*, num_gpus: int = 1, nccl: int | None = 22809, **unavailable: str) -> Machine:
    missing = {name.replace("__", "."): reason for name, reason in unavailable.items()}
    gpus = [H200] * num_gpus
    return Machine(
        torch="2.11.0", gpus=gpus, no_gpu=None, nccl=nccl, backends=["nccl", "ipc"], unavailable=missing, absent=["ray"]
    )


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), *arguments]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


# --- arguments, exit status, output ---------------------------------------------------------------------------------


def test_without_a_gpu_it_ends_with_2_and_one_line_that_says_why() -> None:
    ended = run_script()
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("gpu_check: no NVIDIA GPU: PyTorch ")
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--checks", "nccl,speed"], "'speed' unknown; there are nccl, ipc, mfu, logprob"),
        (["--json", "/nowhere/at/all/x.json"], "there is no directory /nowhere/at/all"),
    ],
)
def test_bad_arguments_end_it_with_2_before_anything_starts(arguments: list[str], says: str) -> None:
    ended = run_script(*arguments)
    assert ended.returncode == 2
    assert says in ended.stderr


def test_checks_run_in_the_tables_order_whatever_order_they_are_asked_in() -> None:
    assert gpu_check.parse_checks("mfu, nccl") == ["nccl", "mfu"]


def test_a_check_that_lacks_something_is_not_run_and_no_failure(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(gpu_check, "find_machine", lambda: machine(xxhash="ModuleNotFoundError: No module named x"))
    assert gpu_check.main(["--checks", "nccl", "--json", str(tmp_path / "out.json")]) == 0
    assert "nccl     not run            needs xxhash: ModuleNotFoundError" in capsys.readouterr().out
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["machine"]["gpus"] == [H200]
    assert [(row["check"], row["result"]) for row in report["rows"]] == [("nccl", "not run")]


def test_a_check_that_breaks_is_a_row_and_ends_it_with_1(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the plan is for a GPU, and there is none
    monkeypatch.setattr(gpu_check, "find_machine", machine)
    out = tmp_path / "out.json"
    assert gpu_check.main(["--checks", "logprob", "--quick", "--json", str(out)]) == 1
    assert "logprob  failed" in capsys.readouterr().out
    (row,) = json.loads(out.read_text())["rows"]
    assert "ended with status 1; its last words: " in row["reasons"][0]
    assert any("Traceback" in line for line in row["log"])


def test_the_table_has_a_line_for_each_figure_and_reason() -> None:
    rows = [
        Row(check="nccl", result="failed", seconds=31.25, figures={"sync_s": 0.12345, "x": None}, reasons=["it broke"]),
        Row(check="ipc", result="not run", reasons=["needs cupy"]),
    ]
    assert gpu_check.format_table(rows).splitlines() == [
        "check    result     time s  figure or reason",
        "nccl     failed       31.2  sync_s                          0.1235",
        "                            it broke",
        "ipc      not run            needs cupy",
    ]


# --- plans ----------------------------------------------------------------------------------------------------------


def test_two_ranks_on_one_gpu_are_two_hosts_for_nccl_before_2_30() -> None:
    jobs = plan(["nccl"], machine(nccl=22907), quick=False)
    planned = jobs["nccl"]
    assert isinstance(planned, Job)
    loopback = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "WARN"}
    assert planned.environment == {"NCCL_HOSTID": "gpu-check-0"} | loopback
    assert planned.settings["receiver_environment"] == {"NCCL_HOSTID": "gpu-check-1"} | loopback
    assert (planned.settings["device"], planned.settings["receiver_device"]) == ("cuda:0", "cuda:0")
    assert planned.settings["num_bytes"] == 2**30


def test_nccl_2_30_is_told_to_share_the_gpu() -> None:
    expected = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_DEBUG": "WARN"}
    assert nccl_environment(23000, num_gpus=1, rank=1) == expected


def test_with_two_gpus_each_rank_has_its_own() -> None:
    planned = plan(["nccl"], machine(num_gpus=2), quick=False)["nccl"]
    assert isinstance(planned, Job)
    assert planned.settings["receiver_device"] == "cuda:1"
    assert planned.environment == planned.settings["receiver_environment"] == {"NCCL_DEBUG": "WARN"}


@pytest.mark.parametrize(
    ("check", "found", "needs"),
    [
        ("nccl", machine(cupy__cuda__nccl="ImportError: x"), "cupy with NCCL (cupy-cuda12x or"),
        ("nccl", machine(nccl=None), "a cupy that finds the NCCL library"),
        ("nccl", machine(nccl=20408), "two GPUs, or NCCL 2.5 or newer"),
        ("ipc", machine(cupy__cuda__runtime="ImportError: x"), "cupy (cupy-cuda12x or cupy-cuda13x): ImportError: x"),
        ("mfu", machine(transformers="ImportError: x"), "transformers 5: ImportError: x"),
    ],
)
def test_what_is_missing_is_named(check: str, found: Machine, needs: str) -> None:
    reason = plan([check], found, quick=True)[check]
    assert isinstance(reason, str)
    assert needs in reason


def test_the_packed_step_has_16k_tokens() -> None:
    assert sum(PACKED_LENGTHS) == 16384


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_a_known_gpu_has_a_dense_peak_and_its_source(name: str, tflops: float) -> None:
    peak = dense_bf16_peak(name)
    assert peak is not None
    assert peak[0] == tflops
    assert "NVIDIA" in peak[1]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "Tesla T4",
    ],
)
def test_a_part_of_a_gpu_and_another_chip_have_none(name: str) -> None:
    assert dense_bf16_peak(name) is None


@pytest.mark.gpu
def test_a_quick_run_on_a_gpu_passes() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--quick"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
