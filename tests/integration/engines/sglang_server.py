"""Run a real SGLang server on the CPU, on loopback, as somebody else would start it for a run."""

from contextlib import AbstractContextManager
from pathlib import Path

from tests.integration.engines.server_process import ServerProcess, free_port, packages, ready, words

_MAIN = Path(__file__).with_name("sglang_main.py")
_SPARE = 8  # tokens of a context that SGLang keeps to itself


def sglang_server(model: Path, log: Path, *, max_model_len: int = 256) -> AbstractContextManager[ServerProcess]:
    """A server that answers."""
    port = free_port()
    flags = {
        "--model-path": model, "--host": "127.0.0.1", "--port": port, "--dtype": "float32", "--device": "cpu",
        "--attention-backend": "torch_native", "--sampling-backend": "pytorch", "--disable-cuda-graph": True,
        "--context-length": max_model_len + _SPARE, "--max-total-tokens": 16384, "--max-running-requests": 33,
        "--mem-fraction-static": 0.2, "--grammar-backend": "none", "--sleep-on-idle": True,
    }  # fmt: skip
    environment = {"PYTHONPATH": packages("sglang-server")}
    return ready(ServerProcess(port, [str(_MAIN), *words(flags)], environment, log), "/health_generate")
