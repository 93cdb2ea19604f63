"""The parts of scripts/gpu_check.py that need no GPU: its processes, and its checks at tiny sizes on the CPU."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from gpu_checks import logprob, sync, training
from gpu_checks.outcome import Outcome
from gpu_checks.plan import Job
from gpu_checks.runner import run_job, run_process
from transformers import Qwen2Config, Qwen2ForCausalLM

from consumer import packed_attention, policy_model

ROOT = Path(__file__).parents[2]
PATHS = f"{ROOT}:{ROOT / 'scripts'}"
SYNC = {"device": "cpu", "receiver_device": "cpu", "receiver_environment": {}, "rounds": 2, "timeout_s": 5.0}
LOGPROB = {"device": "cpu", "num_tokens": 48, "vocabulary": 300, "hidden_size": 32, "compared_tokens": 32, "rounds": 1}
TRAINING = training.TrainingSettings(
    device="cpu", attempts=[("tiny", False)], lengths=[40, 30, 7], rounds=1, peak_tflops=2.0, peak_source="a test"
)


def job(check: str, settings: dict, *, deadline_s: float = 120.0) -> Job:
    return Job(check=check, settings=settings, environment={"OMP_NUM_THREADS": "1"}, deadline_s=deadline_s)


def test_a_check_that_hangs_is_killed_at_its_deadline_with_all_it_started(tmp_path: Path) -> None:
    code = "import subprocess, time\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)\ntime.sleep(600)\n"
    (tmp_path / "hanging.py").write_text(code)
    log = tmp_path / "log"
    failure = run_process("hanging", [], environment={"PYTHONPATH": str(tmp_path)}, log=log, deadline_s=3.0)
    assert failure == "not done within 3 s"
    grandchild = int(log.read_text())
    end = time.monotonic() + 10.0
    while psutil.pid_exists(grandchild) and psutil.Process(grandchild).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_crash_names_its_signal(tmp_path: Path) -> None:
    (tmp_path / "crashing.py").write_text("import os\nos.kill(os.getpid(), 11)\n")
    environment = {"PYTHONPATH": str(tmp_path)}
    failure = run_process("crashing", [], environment=environment, log=tmp_path / "log", deadline_s=60.0)
    assert failure == "killed by SIGSEGV"


def test_the_checks_import_neither_engines_nor_ray() -> None:
    code = """
import sys
class Without:
    def __init__(self, finder): self.finder = finder
    def __getattr__(self, name): return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        absent = name.split(".")[0] in {"ray", "vllm", "colossalai", "cupy", "datasets", "accelerate"}
        return None if absent else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
import gpu_check, gpu_checks.child, gpu_checks.logprob, gpu_checks.peer, gpu_checks.probe, gpu_checks.sync
import gpu_checks.training
try:
    import ray
except ImportError:
    print("isolated")
"""
    environment = os.environ | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200)
    assert ended.stdout == "isolated\n", ended.stderr


# --- the checks, on the CPU -----------------------------------------------------------------------------------------


def assert_synced(figures: dict) -> None:
    assert (figures["equal_digests"], figures["size_mib"]) == (2, 32)
    assert figures["sync_gb_per_s"] > 0
    assert figures["dead_receiver_noticed_s"] < 5.0
    assert figures["stalled_receiver_noticed_s"] >= 5.0


def test_the_sync_check_finds_equal_digests_and_notices_lost_receivers() -> None:
    row = run_job(job("nccl", SYNC | {"backend": "gloo", "num_bytes": 2**25}))
    assert (row.result, row.reasons) == ("passed", [])
    assert_synced(row.figures)


def test_it_does_so_over_shared_segments_too() -> None:
    settings = SYNC | {"backend": "shm", "num_bytes": 2**25, "receiver_environment": {"PYTHONPATH": PATHS}}
    outcome = Outcome()
    sync.check_sync(sync.SyncSettings(**settings), outcome)
    assert outcome.problems == []
    assert_synced(outcome.figures)


def test_a_receiver_that_cannot_start_is_the_reason_at_once() -> None:
    settings = SYNC | {"backend": "gloo", "num_bytes": 2**20, "receiver_environment": {"PYTHONHOME": "/nowhere"}}
    row = run_job(job("nccl", settings, deadline_s=60.0))
    assert row.result == "failed"
    (reason,) = row.reasons
    assert reason.startswith("the receiver's process ended with status 1: ")


def test_a_package_that_is_missing_after_all_makes_a_check_not_run(tmp_path: Path) -> None:
    (tmp_path / "xxhash.py").write_text("import not_installed_anywhere\n")
    environment = {"PYTHONPATH": f"{tmp_path}:{PATHS}"}
    settings = SYNC | {"backend": "gloo", "num_bytes": 2**20}
    row = run_job(Job(check="nccl", settings=settings, environment=environment, deadline_s=60.0))
    assert (row.result, row.reasons[0].split(":")[0]) == ("not run", "needs not_installed_anywhere")


def test_the_logprob_check_agrees_with_the_naive_way_in_a_process_of_its_own() -> None:
    row = run_job(job("logprob", LOGPROB))
    assert (row.result, row.reasons) == ("passed", [])
    assert float(row.figures["fused_error_float32"]) < 1e-5
    assert {"fused_s", "recompute_s", "naive_s", "fused_error_bfloat16"} <= row.figures.keys()
    assert row.figures["fused_peak_mib"] is None


def test_a_wrong_gradient_is_a_problem(monkeypatch) -> None:
    monkeypatch.setitem(logprob.VARIANTS, "fused", lambda inputs: 1.1 * logprob.fused_loss(inputs))
    outcome = Outcome()
    logprob.check_logprob(logprob.LogprobSettings(**LOGPROB), outcome)
    assert [problem.split(" is ")[0] for problem in outcome.problems] == ["fused_error_float32", "fused_error_bfloat16"]


def test_the_training_check_trains_and_reports() -> None:
    outcome = Outcome()
    training.check_training(TRAINING, outcome)
    assert outcome.problems == []
    figures = outcome.figures
    assert (figures["model"], figures["tokens"], figures["counted_tokens"]) == ("tiny", 77, 59)
    assert figures["mfu"] == pytest.approx(float(figures["tflop_per_s"]) / 2.0)


def test_packed_samples_that_see_each_other_are_a_problem(monkeypatch) -> None:
    monkeypatch.setattr(policy_model, "row_lengths", lambda position_ids, sample_index: None)
    outcome = Outcome()
    training.check_training(TRAINING, outcome)
    assert len(outcome.problems) == 1
    assert "packed samples differ from samples alone" in outcome.problems[0]


def test_the_flops_of_a_step_are_six_per_weight_and_token_and_attentions_pairs() -> None:
    config = Qwen2Config(
        vocab_size=100,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    # A layer: q and o of 8 x 8, k and v of 8 x 4, three of 8 x 16.
    weights = 3 * (2 * 64 + 2 * 32 + 3 * 128)
    expected = 6 * weights * 30 + 6 * 100 * 8 * 25 + 6 * 8 * (10**2 + 20**2) * 3
    assert training.step_flops(Qwen2ForCausalLM(config), [10, 20], 25) == expected


def test_an_older_varlen_attention_is_called_without_enable_gqa(monkeypatch) -> None:
    def older(query, *, scale):
        return query * scale

    monkeypatch.setattr(training, "varlen_attn", older)
    monkeypatch.setattr(packed_attention, "varlen_attn", None)
    assert "without enable_gqa" in training.adapt_varlen()
    assert packed_attention.varlen_attn(torch.tensor(3.0), scale=2.0, enable_gqa=True) == 6.0
