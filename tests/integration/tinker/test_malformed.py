"""Two thousand malformed requests: each gets one answer below 500 that is not to be repeated, and nothing is lost."""

import json
import random
from collections import Counter
from typing import Any

import pytest

from tests.tinker_client import Client, loss_body, loss_sum, server

ROWS = [[5, 9, 7, 3], [8, 4, 6]]
NUMBERS = [-1, 0, 2**31, 2**63, 2**64, 10**400, -(10**30), 1.5, float("nan"), float("inf"), 1e308, True]
OTHERS = [None, "", "x" * 300, "\ud800", "../..", "tinker://a/b/c", [], [[]], {}, {"a": {"b": []}}]


class Generator:
    """Make requests that are wrong in one or several places, from right ones."""

    def __init__(self, seed: int, right: list[tuple[str, dict[str, Any]]], body: bytes) -> None:
        self._rng, self._right, self._body = random.Random(seed), right, body

    def next(self) -> tuple[str, bytes, dict[str, str]]:
        if self._rng.random() < 0.4:
            return "forward_backward", self._broken_bytes(), self._headers()
        path, fields = self._rng.choice(self._right)
        body = json.loads(json.dumps(fields))
        for _ in range(self._rng.randint(1, 3)):
            self._break(body)
        data = json.dumps(body).encode()
        if self._rng.random() < 0.15:
            data = data[: self._rng.randrange(len(data))]
        if self._rng.random() < 0.05:
            data = b"[" * 100_000
        return path, data, {"Content_Type": "application/json"}

    def _headers(self) -> dict[str, str]:
        kind = self._rng.choice(["application/x-protobuf"] * 8 + ["application/json", "text/plain"])
        packed = {"Content_Encoding": self._rng.choice(["zstd", "gzip"])} if self._rng.random() < 0.1 else {}
        return {"Content_Type": kind, **packed}

    def _broken_bytes(self) -> bytes:
        data = bytearray(self._body)
        for _ in range(self._rng.randint(1, 4)):
            choice = self._rng.randrange(4)
            place = self._rng.randrange(max(1, len(data)))
            if choice == 0:
                del data[place:]
            elif choice == 1 and data:
                data[place] = self._rng.randrange(256)
            elif choice == 2:
                data[place:place] = self._rng.randbytes(self._rng.randint(1, 12))
            else:
                del data[place : place + self._rng.randint(1, 8)]
        return bytes(data)

    def _break(self, body: Any) -> None:
        """Change a place of nested objects and lists."""
        while True:
            keys = list(body) if isinstance(body, dict) else list(range(len(body)))
            if not keys:
                return
            key = self._rng.choice(keys)
            if isinstance(body[key], dict | list) and self._rng.random() < 0.7:
                body = body[key]
                continue
            if self._rng.random() < 0.2:
                del body[key]
            else:
                body[key] = self._rng.choice([*NUMBERS, *OTHERS])
            return


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.full)])
def test_malformed_requests_get_one_answer_below_500_and_nothing_is_lost(model_dir, tmp_path, count):
    with server(model_dir, tmp_path, "--poll-s", "0.1", "--max-models", "3000") as process:
        anna, bert = Client(process.port), Client(process.port, "tml-of-bert-0123456789")
        session, other = anna.session(), bert.session()
        model, own = anna.model(session), bert.model(other)
        sampler = anna.sampler(model, 1, 0)
        path = anna.wait(anna.post("save_weights", model_id=model, seq_id=2, path="kept"))["path"]
        first = loss_sum(anna.wait(anna.send_loss(model, 3, ROWS)))
        prompt = {"chunks": [{"tokens": [1, 2, 3]}]}
        config = {"rank": 2, "seed": 1, "train_mlp": True}
        right: list[tuple[str, dict[str, Any]]] = [
            ("create_session", {"sdk_version": "0.38.0", "tags": [], "user_metadata": {"a": 1}}),
            ("session_heartbeat", {"session_id": other}),
            ("create_model", {"session_id": other, "model_seq_id": 7, "base_model": "tiny", "lora_config": config}),
            ("get_info", {"model_id": own}),
            ("optim_step", {"model_id": own, "seq_id": 9, "adam_params": {"learning_rate": 0.1, "beta1": 0.9}}),
            ("save_weights", {"model_id": own, "seq_id": 9, "path": "x", "ttl_seconds": 5, "overwrite": True}),
            ("save_weights_for_sampler", {"model_id": own, "seq_id": 9, "kind": "snapshot"}),
            ("load_weights", {"session_id": other, "model_seq_id": 8, "path": path, "optimizer": True}),
            ("load_weights", {"model_id": own, "seq_id": 8, "path": path, "optimizer": True}),
            ("create_sampling_session", {"session_id": other, "sampling_session_seq_id": 1, "model_path": path}),
            (
                "asample",
                {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt, "sampling_params": {"seed": 1}},
            ),
            ("retrieve_future", {"request_id": "x", "allow_metadata_only": True}),
            ("cancel_future", {"request_id": "x"}),
            ("weights_info", {"tinker_path": path}),
            ("telemetry", {"events": [], "session_id": session}),
        ]
        generator, seen = Generator(count, right, loss_body(own, 1, ROWS, weights=[1.0] * 4)), Counter[int]()
        for number in range(count):
            call, body, headers = generator.next()
            client = bert if number % 4 else anna
            status, data, _ = client.call("POST", call, body, **headers)
            assert status < 500 and status not in (409,), (status, call, body[:200], data)
            seen[status] += 1
            if status >= 400 and status != 408:
                assert json.loads(data)["error"], (status, call, data)
        assert sum(seen[status] for status in (400, 404, 410, 413, 422)) > count // 2, seen
        assert set(seen) <= {200, 204, 400, 404, 408, 410, 413, 422}, seen
        assert loss_sum(anna.wait(anna.send_loss(model, 4, ROWS))) == first
        assert anna.post("weights_info", tinker_path=path)["lora_rank"] == 4
        again = bert.model(bert.session())
        assert loss_sum(bert.wait(bert.send_loss(again, 1, ROWS))) > 0
        process.end()
        assert "Traceback" not in process.log, process.log[-3000:]
