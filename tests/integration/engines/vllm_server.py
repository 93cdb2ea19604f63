"""Run a real vLLM server on the CPU, on loopback, as somebody else would start it for a run."""

import os
from contextlib import AbstractContextManager
from pathlib import Path

from producer.engines.environment import engine_environment
from producer.engines.served.vllm_identity import LOADER
from tests.integration.engines.server_process import REPOSITORY, ServerProcess, free_port, packages, ready, words


def vllm_server(
    model: Path, log: Path, *, has_loader: bool = False, max_model_len: int = 256
) -> AbstractContextManager[ServerProcess]:
    """A server that answers."""
    port = free_port()
    flags = {
        "--model": model, "--host": "127.0.0.1", "--port": port, "--dtype": "float32",
        "--max-model-len": max_model_len, "--max-num-seqs": 33, "--kv-cache-memory-bytes": 2**27,
        "--block-size": 32, "--max-num-batched-tokens": 4096, "--logprobs-mode": "processed_logprobs",
        "--enforce-eager": True, "--no-enable-chunked-prefill": True, "--enable-scale-out": True,
        **({"--worker-extension-cls": LOADER} if has_loader else {}),
    }  # fmt: skip
    paths = [packages("vllm-server"), *([str(REPOSITORY)] if has_loader else [])]
    environment = {
        **engine_environment("cpu", 1),
        "PYTHONPATH": os.pathsep.join(paths),
        "VLLM_SERVER_DEV_MODE": "1",
    }
    command = ["-m", "vllm.entrypoints.openai.api_server", *words(flags)]
    return ready(ServerProcess(port, command, environment, log), "/health")
