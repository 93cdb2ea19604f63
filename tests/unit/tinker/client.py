"""Speak Tinker's API without its client, in JSON and protobuf, to a server that is a process."""

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from coati_rl.tinker.messages import MESSAGES

ROOT = Path(__file__).parents[3]
KEY = "tml-of-anna-0123456789"


class Client:
    """Call a server; `key` is the caller's."""

    def __init__(self, port: int, key: str = KEY) -> None:
        self.port, self.key = port, key

    def call(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            sent = {"X-API-Key": self.key, **{name.replace("_", "-"): value for name, value in headers.items()}}
            connection.request(method, f"/api/v1/{path}", body, sent)
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers.get("content-type", "")
        finally:
            connection.close()

    def post(self, call: str, /, **body: Any) -> Any:
        """Post JSON; the answer must be one."""
        status, data, _ = self.call("POST", call, json.dumps(body).encode(), Content_Type="application/json")
        assert status in (200, 204), f"{call}: {status} {data!r}"
        return json.loads(data) if data else None

    def refused(self, call: str, /, **body: Any) -> tuple[int, str]:
        status, data, _ = self.call("POST", call, json.dumps(body).encode(), Content_Type="application/json")
        return status, json.loads(data)["error"]

    def wait(self, answer: Any, *, within_s: float = 60.0) -> Any:
        """Poll a future: a dictionary, or the bytes of a protobuf."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            body = json.dumps({"request_id": answer["request_id"]}).encode()
            status, data, kind = self.call("POST", "retrieve_future", body)
            if status != 408:
                assert status == 200, (status, data)
                return data if "protobuf" in kind else json.loads(data)
        raise AssertionError("the answer did not come")

    def session(self) -> str:
        name: str = self.post("create_session", sdk_version="0.38.0", tags=[], user_metadata=None)["session_id"]
        return name

    def model(self, session: str, number: int = 0, **lora: Any) -> str:
        config = {"rank": 4, "seed": number, **lora}
        asked = {"session_id": session, "model_seq_id": number, "base_model": "tiny", "lora_config": config}
        answer = self.wait(self.post("create_model", **asked))
        assert "model_id" in answer, answer
        name: str = answer["model_id"]
        return name

    def send_loss(self, model: str, seq: int, rows: list[list[int]], loss: str = "cross_entropy", **others: Any) -> Any:
        body = loss_body(model, seq, rows, loss, **others)
        status, data, _ = self.call("POST", "forward_backward", body, Content_Type="application/x-protobuf")
        assert status == 200, (status, data)
        return json.loads(data)

    def step(self, model: str, seq: int, rate: float = 1e-2) -> Any:
        return self.post("optim_step", model_id=model, seq_id=seq, adam_params={"learning_rate": rate})

    def sampler(self, model: str, seq: int, number: int, kind: str = "snapshot") -> str:
        asked = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": number, "kind": kind}
        name: str = self.wait(self.post("save_weights_for_sampler", **asked))["sampling_session_id"]
        return name

    def sample(self, sampler: str, seq: int, prompt: list[int], samples: int = 1, **params: Any) -> Any:
        body = {"sampling_session_id": sampler, "seq_id": seq, "num_samples": samples}
        params = {"max_tokens": 8, "seed": 1, **params}
        asked = self.post("asample", **body, prompt={"chunks": [{"tokens": prompt}]}, sampling_params=params)
        return MESSAGES["SampleResponse"].FromString(self.wait(asked))


def loss_body(model: str, seq: int, rows: list[list[int]], loss: str = "cross_entropy", **inputs: list[float]) -> bytes:
    """A request on sequences of tokens; each input is a number a token, the same of all rows."""
    request = MESSAGES["ForwardBackwardRequest"](model_id=model, seq_id=seq, loss_fn=loss)
    for row in rows:
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(row[:-1], "<i4").tobytes()
        fill(datum.loss_fn_inputs["target_tokens"], np.array(row[1:], "<i8"))
        for name, values in inputs.items():
            fill(datum.loss_fn_inputs[name], np.array(values[: len(row) - 1], "<f4"))
    written: bytes = request.SerializeToString()
    return written


def fill(tensor: Any, array: np.ndarray) -> None:
    tensor.dense, tensor.dtype = array.tobytes(), 1 if array.dtype == np.float32 else 2
    tensor.shape.extend(array.shape)


def loss_sum(answer: bytes) -> float:
    value: float = MESSAGES["ForwardBackwardOutput"].FromString(answer).metrics["loss:sum"]
    return value


class ServerProcess:
    """Hold a server that runs as a process of its own."""

    def __init__(self, model: Path, root: Path, *flags: str, die_at: str = "") -> None:
        command = [sys.executable, "-m", "tests.tinker_server", "--model", f"tiny={model}", "--root", str(root)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TINKER_TEST_DIE_AT": die_at}
        keys = ["--key", f"anna={KEY}", "--key", "bert=tml-of-bert-0123456789"]
        self._process = subprocess.Popen(
            [*command, "--port", "0", *keys, *flags],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.log: list[str] = []
        self.port = self._port()

    def _port(self) -> int:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.log.append(line)
            if "serving tiny on http://" in line:
                return int(line.partition("http://127.0.0.1:")[2].partition(",")[0])
        raise AssertionError("".join(self.log))

    def wait(self) -> int:
        """Wait until it has ended, and return its exit code."""
        self.log.append(self._process.communicate(timeout=60)[0])
        return self._process.returncode

    def end(self) -> None:
        self._process.terminate()
        self.wait()


@contextmanager
def server(model: Path, root: Path, *flags: str, die_at: str = "") -> Iterator[ServerProcess]:
    process = ServerProcess(model, root, *flags, die_at=die_at)
    try:
        yield process
    finally:
        if process._process.poll() is None:
            process.end()
