"""Answer as vLLM's HTTP server does, in this process: with replies that were recorded from it (`replies.json`).

Of vLLM 0.32.0 on the CPU, with the model of `save_checkpoint(..., 0, tied=False)`. What depends on the conversation is
put into the recorded forms: the version of the weights, the digests of the file that was loaded, token ids of texts.
`tests/integration/engines` has the same conversation with the server itself.
"""

import copy
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from safetensors.torch import load_file

REPLIES = json.loads((Path(__file__).parents[2] / "data" / "vllm_server" / "replies.json").read_text())
_PAUSED_S = 20.0  # after which a paused server gives up; vLLM's never does
_EMPTY = hashlib.sha256().hexdigest()


class RecordedServer:
    """One server. Tests change its replies, and what it does."""

    def __init__(self, model: Path, tokenizer: Any) -> None:
        self.replies = copy.deepcopy(REPLIES)
        self.tokenizer = tokenizer
        self.loaded = load_file(model / "model.safetensors")
        self.version = "default"
        self.asked: list[tuple[str, Any]] = []  # paths and bodies, in order
        self.ignores_updates = False
        self.text: dict[str, bytes] = {}  # path -> its reply in place of JSON
        self.holds: threading.Event | None = None  # generate answers when it is set
        self.runs = threading.Event()  # not between /pause and /resume, when generate does not answer
        self.runs.set()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        self.asked.append((path, body))
        if path == "/health":
            return self.replies.get(path, [200, None])
        if path == "/inference/v1/generate":
            return self._generate(body)
        if path == "/collective_rpc":
            return self._call(body)
        if path == "/weight_checker":
            return 200, {"checksums": self._checksums()}
        status, reply = copy.deepcopy(self.replies.get(path, [404, {"detail": "Not Found"}]))
        if path in ("/pause", "/resume") and status == 200:
            (self.runs.clear if path == "/pause" else self.runs.set)()
        if path == "/update_weight_version":
            self.version = reply["new_version"] = body["new_version"]
        if path == "/tokenize":
            reply["tokens"] = self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
        return status, reply

    def _generate(self, body: Any) -> tuple[int, Any]:
        if "prompt_logprobs" in body["sampling_params"]:
            return copy.deepcopy(self.replies["prompt_logprobs"])
        if max(body["token_ids"]) >= 320:
            return self.replies["refused"]
        if not self.runs.wait(_PAUSED_S):
            return 503, None
        if self.holds is not None:
            self.holds.wait(60)
        status, reply = copy.deepcopy(self.replies["/inference/v1/generate"])
        if status != 200:
            return status, reply
        reply["choices"] = reply["choices"][: body["sampling_params"].get("n", 1)]
        for choice in reply["choices"]:
            for span in choice["weight_versions"]:
                span["version"] = self.version
        return status, reply

    def _call(self, body: Any) -> tuple[int, Any]:
        if body["method"] == "get_model_inspection":
            return self.replies["inspection"]
        if not self.ignores_updates:
            try:
                self.loaded = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
            except OSError:
                return self.replies["reload_failed"]
        return self.replies["reload_weights"]

    def _checksums(self) -> dict[str, str]:
        recorded: dict[str, str] = self.replies["/weight_checker"][1]["checksums"]
        tensors = {f"dp0:pp0:pcp0:tp0:{name}": tensor for name, tensor in self.loaded.items()}
        return {
            key: _EMPTY if digest == _EMPTY else hashlib.sha256(tensors[key].numpy().tobytes()).hexdigest()
            for key, digest in recorded.items()
        }

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size) or "null")
                status, reply = outer.answer(urlsplit(self.path).path, body)
                path = urlsplit(self.path).path
                content = outer.text.get(path, b"" if reply is None else json.dumps(reply).encode())
                self.send_response(status)
                if status == 307:
                    self.send_header("Location", "http://127.0.0.1:9/elsewhere")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        return Handler
