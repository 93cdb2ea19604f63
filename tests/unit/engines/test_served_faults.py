"""Test what an engine does when its server is started again in a commit, is full of requests or answers nonsense."""

import threading
from queue import Queue

import pytest
from safetensors import SafetensorError
from safetensors.torch import load_file

from coati_rl.errors import EngineError
from producer.engines.served import server as served_server
from producer.engines.served import weights
from producer.engines.served.calls import ServerFacts
from producer.engines.served.server import Server
from producer.engines.served.vllm_calls import VllmCalls
from producer.engines.served.weights import ServedWeights
from tests.unit.engines.test_served_engine import (
    PROMPT,
    checkpoints_loaded,
    harness,
    models,
    server,
    tokenizer,
    trained,
)

__all__ = ["checkpoints_loaded", "harness", "models", "server", "tokenizer", "trained"]  # fixtures


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", ["/weight_checker", "/reset_prefix_cache", "/resume"])
def test_a_server_that_is_started_again_in_a_commit_samples_nothing_for_the_new_version(path, trained, server, models):
    version, answer = trained.stage_checkpoint(1), server.answer

    def as_after_a_start(asked, body):
        if asked == path and server.version != "default":
            server.loaded, server.version = load_file(models[0] / "model.safetensors"), "default"
            server.runs.set()
            raise ConnectionError("the process has ended")
        return answer(asked, body)

    server.answer = as_after_a_start
    with pytest.raises(EngineError, match=r"has stale weights|which this run has not sent"):
        trained.engine.commit_weights(version, in_flight=False, timeout_s=20.0)
        trained.complete(PROMPT, max_new_tokens=3)


class Ranks:
    """A server whose workers have `LoadingWorker`, and may end between two calls."""

    def __init__(self, ends_before: str) -> None:
        self._ends_before = ends_before
        self.digest, self.version, self.url = "", "default", "http://127.0.0.1:1"

    def post(self, path, body=None, *, timeout_s):
        method = (body or {}).get("method", path)
        if method == self._ends_before:
            self.digest, self.version = "", "default"
        if method == "coati_load":
            self.digest = "the digest"
        self.version = (body or {}).get("new_version", self.version)
        return {"results": [self.digest], "success": True}


@pytest.mark.parametrize("ends_before", ["nothing", "/update_weight_version", "coati_loaded", "/resume"])
def test_workers_that_load_files_themselves_say_at_the_end_what_they_have(ends_before, tmp_path, checkpoints_loaded):
    ranks = Ranks(ends_before)
    facts = ServerFacts(num_ranks=1, has_loader=True)
    served = ServedWeights(ranks, VllmCalls(ranks), tmp_path / "weights", facts, dtype="float32")
    staged = Staged(checkpoints_loaded[0])
    served.write(staged)
    if ends_before in ("/update_weight_version", "coati_loaded"):
        with pytest.raises(EngineError, match="has stale weights"):
            served.load(staged, "ours/3")
    else:
        assert served.load(staged, "ours/3") == "the digest"
        assert ranks.version == ("ours/3" if ends_before == "nothing" else "default")


class Staged:
    """An update of one tensor."""

    policy_version, digest = 3, "the digest"

    def __init__(self, model):
        self.tensors = [("model.norm.weight", model.model.norm.weight.data)]


def test_health_and_probe_do_not_wait_for_completions(monkeypatch, harness, server):
    monkeypatch.setattr(served_server, "_NUM_COMPLETIONS", 2)
    monkeypatch.setattr(served_server, "LOST_AFTER_S", 1.0)
    server.holds = threading.Event()
    asker = Server(server.url)
    body = {"token_ids": list(PROMPT), "sampling_params": {}}
    calls = [
        asker.start("/inference/v1/generate", body, timeout_s=60.0, max_reply_bytes=1 << 20, is_completion=True)
        for _ in range(3)
    ]
    probe = {"token_ids": list(PROMPT), "sampling_params": {"prompt_logprobs": 0}}
    answer = asker.start("/inference/v1/generate", probe, timeout_s=5.0, max_reply_bytes=1 << 20, is_completion=False)
    assert answer.result(10.0)["prompt_logprobs"]
    assert asker.get("/health", timeout_s=5.0) == {}
    assert not any(call.done() for call in calls)
    server.holds.set()
    assert all(call.result(20.0)["choices"] for call in calls), "also the third, which waited here"
    asker.close()


def test_a_server_that_answers_nonsense_about_its_health_is_lost(monkeypatch, server):
    monkeypatch.setattr(served_server, "_WATCH_S", 0.05)
    server.text = {"/health": b"[" * 100_000}
    lost: Queue[str] = Queue()
    asker = Server(server.url)
    asker.watch("/health", lost.put)
    assert lost.get(timeout=60.0).startswith("/health answered no JSON: maximum recursion depth exceeded")
    asker.close()


def test_a_full_disk_refuses_the_update_with_the_path_and_the_engine_lives(monkeypatch, trained, tmp_path):
    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as disk:
        disk.setattr(weights, "save_file", full)
        with pytest.raises(EngineError, match=rf"cannot be written to {tmp_path}.*No space left on device"):
            trained.stage_checkpoint(1)
    assert trained.complete(PROMPT, max_new_tokens=3)
