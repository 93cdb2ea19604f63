"""Speak Tinker's API without its client, in JSON and protobuf, to a server that is a process."""

import http.client
import json
import multiprocessing
import os
import re
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from coati_rl.tinker.messages import MESSAGES

_MODELS = ["transformers.models.qwen3.modeling_qwen3", "transformers.models.auto.modeling_auto"]
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


_FORKS = multiprocessing.get_context("forkserver")  # of a process that has imported what a server does
_PARTS = ["coati.training_session", "producer.samplers.transformers_samplers"]
_FORKS.set_forkserver_preload(
    ["tests.tinker_server", "coati_rl.tinker.app", "coati_rl.tinker.service", *_PARTS, *_MODELS]
)


def _serve(arguments: list[str], die_at: str, log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["TINKER_TEST_DIE_AT"] = die_at
    from coati_rl.tinker.command import run_command
    from tests.tinker_server import mortal_base

    sys.exit(run_command(arguments, mortal_base))


class ServerProcess:
    """Hold a server that runs as a process of its own."""

    def __init__(self, model: Path, root: Path, *flags: str, die_at: str = "", name: str = "tiny") -> None:
        keys = ["--key", f"anna={KEY}", "--key", "bert=tml-of-bert-0123456789"]
        arguments = ["--model", f"{name}={model}", "--root", str(root), "--port", "0", *keys, *flags]
        self._log = root.with_name(f"{root.name}-{uuid.uuid4().hex}.log")
        self._process = _FORKS.Process(target=_serve, args=(arguments, die_at, str(self._log)))
        self._process.start()
        self.port = self._port()

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def _port(self) -> int:
        while (found := re.search(r"serving \S+ on http://127.0.0.1:(\d+)", self.log)) is None:
            assert self._process.is_alive(), self.log
            time.sleep(0.05)
        return int(found[1])

    def wait(self) -> int:
        """Wait until it has ended, and return its exit code."""
        self._process.join(60)
        assert self._process.exitcode is not None, "the server does not end"
        return self._process.exitcode

    def end(self) -> None:
        self._process.terminate()
        self.wait()


@contextmanager
def server(model: Path, root: Path, *flags: str, name: str = "tiny") -> Iterator[ServerProcess]:
    process = ServerProcess(model, root, *flags, name=name)
    try:
        yield process
    finally:
        process.end()
