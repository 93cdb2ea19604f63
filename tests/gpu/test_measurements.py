"""Test that the measurements of docs/gpu.md run at small sizes, without Ray and engines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.mfu import dense_bf16_peak, step_flops
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.gpu.devices import IS_EMULATED, on_cpu_and_gpu

ROOT = Path(__file__).parents[2]
PROGRAM = """
import runpy, sys
import pytest

class Without:
    def __init__(self, finder): self.finder = finder
    def __getattr__(self, name): return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        absent = name.partition(".")[0] in {"ray", "vllm", "colossalai", "datasets", "accelerate"}
        return None if absent else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
with pytest.raises(ImportError):
    import ray
device, directory = sys.argv[1:]
for name in ("weight_sync", "logprob_loss", "mfu"):
    sys.argv = [name, "--device", device, "--quick", "--json", f"{directory}/{name}.json"]
    runpy.run_path(f"scripts/bench/{name}.py", run_name="__main__")
sys.exit(pytest.main(["--collect-only", "--quiet", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"]))
"""


@pytest.mark.full
@pytest.mark.skipif(IS_EMULATED, reason="they measure speed; a model of their size takes minutes a step without a GPU")
@on_cpu_and_gpu
def test_each_runs_and_the_tests_are_found_without_ray_and_engines(device: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, device, str(tmp_path)]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "test_updates_by_turns_arrive_bit_for_bit_on_the_receivers_device[ipc]" in ended.stdout
    sync, loss, step = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("weight_sync", "logprob_loss", "mfu")
    )
    transports = {"cpu": {"shm", "gloo", "file"}, "cuda": {"nccl", "ipc"}}[device]
    assert sync["staging"].keys() == {"memcpy"} | transports
    assert all(figures["gb_per_s"] > 0 for figures in sync["staging"].values())
    assert {"fused", "recompute"} <= loss["medians"]["wall s"].keys()
    assert all(mib >= 0 for mib in loss["medians"]["peak MiB"].values())
    assert (step["tokens"], step["counted_tokens"]) == {"cpu": (77, 59), "cuda": (2560, 1920)}[device]
    assert step["tflop_per_s"] > 0


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
    assert step_flops(Qwen2ForCausalLM(config), [10, 20], 25) == expected


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla T4", None),
    ],
)
def test_a_part_of_a_gpu_and_an_unknown_one_have_no_peak(name: str, tflops: float | None) -> None:
    assert dense_bf16_peak(name) == tflops
