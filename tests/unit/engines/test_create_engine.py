"""Test the factory of engines, and that importing it imports no engine library."""

import subprocess
import sys
from pathlib import Path

import pytest

from coati_rl.errors import ConfigError
from coati_rl.model_files.adapter_files import AdapterSpec
from producer.engines import EngineOptions, create_engine, engine_environment


def test_importing_the_package_imports_no_engine():
    code = "import sys, producer.engines; sys.exit(bool({'vllm', 'transformers', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3]).returncode == 0


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="use vllm, transformers, fake or http"):
        create_engine("sglang", EngineOptions(model="m", max_model_len=8))


@pytest.mark.parametrize("backend", ["transformers", "fake"])
def test_tensor_parallelism_is_vllms_alone(backend):
    with pytest.raises(ConfigError, match="-ptp 1"):
        create_engine(backend, EngineOptions(model="m", max_model_len=8, tensor_parallel_size=2))


def test_the_environment_keeps_the_engine_in_process_and_pinned():
    cpu = engine_environment("cpu", 1, num_threads=3)
    assert cpu["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert cpu["OMP_NUM_THREADS"] == "3"
    assert cpu["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in engine_environment("cuda", 1)
    assert engine_environment("cpu", 2)["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert all(isinstance(value, str) for value in cpu.values())


@pytest.mark.parametrize(("backend", "quantization"), [("transformers", None), ("vllm", "fp8")])
def test_adapters_alone_are_for_a_base_of_vllm_that_is_not_quantized(backend, quantization):
    spec = AdapterSpec(rank=4, alpha=8.0, targets=("q_proj",))
    with pytest.raises(ConfigError, match="use --lora-sync merged"):
        create_engine(backend, EngineOptions(model="m", max_model_len=8, adapter=spec, quantization=quantization))
