"""Run a real vLLM server on the CPU, on loopback, as somebody else would start it for a run.

The packages that only the server needs are not in the test environment: `scripts/extra_packages.sh` installs them
in a folder beside it, which is on the server's PYTHONPATH alone.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from producer.engines.environment import engine_environment
from producer.engines.served.vllm_identity import LOADER

REPOSITORY = Path(__file__).parents[3]
_READY_S = 240.0


@contextmanager
def vllm_server(
    model: Path, log: Path, *, has_loader: bool = False, max_model_len: int = 256
) -> Iterator["VllmServer"]:
    """A server that answers; it is killed at the end, with its processes."""
    server = VllmServer(model, log, has_loader=has_loader, max_model_len=max_model_len)
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


class VllmServer:
    """One server process."""

    def __init__(self, model: Path, log: Path, *, has_loader: bool, max_model_len: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{self.port}", log
        flags = {
            "--model": model, "--host": "127.0.0.1", "--port": self.port, "--dtype": "float32",
            "--max-model-len": max_model_len, "--max-num-seqs": 33, "--kv-cache-memory-bytes": 2**27,
            "--block-size": 32, "--max-num-batched-tokens": 4096, "--logprobs-mode": "processed_logprobs",
        }  # fmt: skip
        if has_loader:
            flags["--worker-extension-cls"] = LOADER
        switches = ["--enforce-eager", "--no-enable-chunked-prefill", "--enable-scale-out"]
        words = [str(word) for pair in flags.items() for word in pair]
        paths = [str(server_packages()), *([str(REPOSITORY)] if has_loader else [])]
        environment = {
            **os.environ,
            **engine_environment("cpu", 1),
            "PYTHONPATH": os.pathsep.join(paths),
            "VLLM_SERVER_DEV_MODE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, *switches],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        end = time.monotonic() + _READY_S
        while time.monotonic() < end:
            assert self.process.poll() is None, f"the server has ended:\n{self._log.read_text()[-3000:]}"
            try:
                with urlopen(f"{self.url}/health", timeout=5):
                    return
            except (URLError, OSError):
                time.sleep(0.5)
        raise AssertionError(f"the server is not ready:\n{self._log.read_text()[-3000:]}")

    def stop(self) -> None:
        """Stop all of its processes, without ending them."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def server_packages() -> Path:
    """The folder of the packages that only the server needs, installed once."""
    command = [str(REPOSITORY / "scripts" / "extra_packages.sh"), sys.executable, "vllm-server"]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
