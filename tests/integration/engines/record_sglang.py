"""Record a conversation with a real SGLang server, for `tests/unit/engines/recorded_sglang.py`.

PYTHONPATH=.:scripts python -m tests.integration.engines.record_sglang > tests/data/sglang_server/replies.json
"""

import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from producer.engines.served.server import Server
from producer.engines.served.sglang_calls import SglangCalls
from tests.integration.engines.conftest import save_checkpoint
from tests.integration.engines.harness import request
from tests.integration.engines.sglang_server import sglang_server

PROMPT = (40, 41, 42)
SETTINGS = (
    "version", "dtype", "kv_cache_dtype", "quantization", "speculative_algorithm", "enable_lora", "tp_size", "pp_size",
    "preferred_sampling_params", "skip_tokenizer_init", "device", "enable_deterministic_inference", "max_req_input_len",
)  # fmt: skip


def ask(url: str, path: str, body: Any = None) -> list[Any]:
    """The status and the JSON of a reply."""
    content = None if body is None else json.dumps(body).encode()
    asked = Request(url + path, data=content, headers={"Content-Type": "application/json"})
    try:
        with urlopen(asked, timeout=60) as reply:
            return [reply.status, json.loads(reply.read() or b"null")]
    except HTTPError as error:
        return [error.code, json.loads(error.read())]


def record(url: str, update: Path) -> dict[str, Any]:
    calls = SglangCalls(Server(url), has_seeds=False)

    def generate(name: str, **sampling: Any) -> list[Any]:
        asked = request(name, PROMPT, num_samples=2, **sampling)
        return ask(url, "/generate", calls.generate_body(asked, name, max_new_tokens=asked.sampling.max_new_tokens))

    def aborted() -> list[Any]:
        found: list[Any] = []
        waiting = threading.Thread(target=lambda: found.extend(generate("long", max_new_tokens=200)))
        waiting.start()
        time.sleep(0.3)
        calls.abort("long", 2, timeout_s=5.0)
        waiting.join()
        return found

    status, info = ask(url, "/server_info")
    even = {"max_new_tokens": 1, "temperature": 1e9, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    disk = {"load_format": "safetensors", "weight_version": "new", "flush_cache": True}
    return {
        "/model_info": ask(url, "/model_info"),
        "/server_info": [status, {name: info[name] for name in SETTINGS}],
        "/tokenize": ask(url, "/tokenize", {"prompt": "Solve", "add_special_tokens": False}),
        "/generate": generate("plain", max_new_tokens=3),
        "cut": generate("cut", max_new_tokens=3, top_k=6, top_p=0.9),
        "aborted": aborted(),
        "prompt_logprobs": ask(url, "/generate", calls.probe_body((40, 41, 319), "probe")),
        "even": ask(
            url,
            "/generate",
            {"input_ids": [0], "sampling_params": even, "return_logprob": True, "top_logprobs_num": 2},
        ),
        "refused": ask(url, "/generate", {"input_ids": [40] * 300, "sampling_params": {"max_new_tokens": 1}}),
        "/update_weight_version": ask(url, "/update_weight_version", {"new_version": "new"}),
        "/weights_checker": ask(url, "/weights_checker", {"action": "checksum"}),
        "/pause_generation": ask(url, "/pause_generation", {"mode": "retract"}),
        "reload_failed": ask(url, "/update_weights_from_disk", {"model_path": str(update / "nothing"), **disk}),
        "/update_weights_from_disk": ask(url, "/update_weights_from_disk", {"model_path": str(update), **disk}),
        "/continue_generation": ask(url, "/continue_generation", {"torch_empty_cache": False}),
        "/abort_request": ask(url, "/abort_request", {"rid": "unknown"}),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        models = [save_checkpoint(Path(folder) / str(seed), seed, tied=False) for seed in (0, 1)]
        with sglang_server(models[0], Path(folder) / "log") as server:
            text = json.dumps(record(server.url, models[1]), indent=1)
    sys.stdout.write(text.replace(folder, "FOLDER") + "\n")


if __name__ == "__main__":
    main()
