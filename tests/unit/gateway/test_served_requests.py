"""Test what `coati-rl serve` alone takes: the template's variables, forms of answers; health, metrics."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from coati_rl.types import SamplingParams
from producer.engines.engine_thread import ThreadedEngine
from producer.environments.chat import ChatTemplate
from producer.gateway.conversations import Language, UnrecordedConversation
from producer.gateway.engine_sample import EngineSample
from producer.gateway.sampling_rules import SamplingRules
from producer.gateway.served_models import ServedModels
from producer.gateway.server import ServerThread
from producer.gateway.service_metrics import CountedSession
from producer.serve_command import _app
from tests.unit.gateway.speaking_engine import SpeakingCore, speaking_engine
from tests.unit.producer.chat_families import family_tokenizer

USER = {"role": "user", "content": "Hello"}
KEY = "k" * 32
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@dataclass
class Model:
    client: httpx.Client
    engine: ThreadedEngine
    core: SpeakingCore

    def chat(self, **more) -> httpx.Response:
        return self.client.post("v1/chat/completions", json={"messages": [USER], **more})

    def prompt(self) -> str:
        return str(self.core.tokenizer.decode(list(self.core.requests[-1].token_ids)))


@contextmanager
def serving(family: str, *, no_schema: str = "") -> Iterator[Model]:
    tokenizer = family_tokenizer(family)
    engine, core = speaking_engine(tokenizer, lambda prompt, seed: "Said.")
    language, sampling = Language(tokenizer, ChatTemplate(tokenizer), None), SamplingParams(max_new_tokens=50)
    session = CountedSession(
        UnrecordedConversation(language),
        EngineSample(engine, sampling),
        SamplingRules(sampling=sampling, no_schema=no_schema),
        decode=language.decode,
        max_in_flight=4,
    )
    server = ServerThread(_app(session, engine, KEY, ServedModels.one("model")))
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=20, trust_env=False, verify=False) as client:
        try:
            yield Model(client, engine, core)
        finally:
            server.close()
            engine.close()


@pytest.fixture(scope="module")
def qwen() -> Iterator[Model]:
    with serving("qwen3") as model:
        yield model


def test_chat_template_kwargs_go_to_the_chat_template(qwen) -> None:
    assert qwen.chat().status_code == 200 and "<think>" not in qwen.prompt()
    assert qwen.chat(chat_template_kwargs={"enable_thinking": False}).status_code == 200
    assert qwen.prompt().endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "sets tokenize, which is not the"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "dictionary"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "the model's chat template does not read it; leave it out"),
        ({"reasoning_effort": 3}, "reasoning_effort", "string"),
        ({"seed": False}, "seed", "a truth value is no number"),
        ({"temperature": True}, "temperature", "a truth value is no number"),
        ({"response_format": {"type": "xml"}}, "response_format", "'text', 'json_object' or 'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", 'needs {"type": "json_schema"'),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}}, "response_format", "dictionary"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_its_name(qwen, fields, param, message) -> None:
    num_requests = len(qwen.core.requests)
    reply = qwen.chat(**fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert message in error["message"] and len(qwen.core.requests) == num_requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"logprobs": False}, "logprobs"), ({"logprobs": True}, "logprobs"), ({"prompt": [1, True]}, "prompt")],
)
def test_a_truth_value_is_no_number_of_a_completion(qwen, fields, param) -> None:
    reply = qwen.client.post("v1/completions", json={"prompt": "x", **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_reasoning_effort_goes_to_a_template_that_reads_it() -> None:
    with serving("gptoss") as model:
        for effort in ("low", "high"):
            assert model.chat(reasoning_effort=effort).status_code == 200
            assert f"Reasoning: {effort}" in model.prompt()
        assert model.chat(chat_template_kwargs={"reasoning_effort": "low"}).status_code == 200
        assert "Reasoning: low" in model.prompt()


def test_a_response_format_constrains_the_samples(qwen) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": SCHEMA}}
    for form, expected in ((schema, SCHEMA), ({"type": "json_object"}, {"type": "object"}), ({"type": "text"}, None)):
        assert qwen.chat(response_format=form).status_code == 200
        found = qwen.core.requests[-1].json_schema
        assert (None if found is None else json.loads(found)) == expected
    assert qwen.client.post("v1/completions", json={"prompt": "x", "response_format": schema}).status_code == 200
    assert json.loads(qwen.core.requests[-1].json_schema) == SCHEMA


def test_a_backend_without_constrained_decoding_refuses_a_response_format() -> None:
    with serving("qwen3", no_schema="-b transformers cannot constrain answers; use -b vllm") as model:
        error = model.chat(response_format={"type": "json_object"}).json()["error"]
        assert error["message"] == (
            "response_format: is not supported: -b transformers cannot constrain answers; use -b vllm"
        )
        assert model.chat(response_format={"type": "text"}).status_code == 200


def samples(model: Model) -> dict[str, float]:
    reply = model.client.get("metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(reply.text)
    return {each.name + each.labels.get("status", ""): each.value for family in families for each in family.samples}


def test_metrics_count_requests_by_status_and_tokens_as_prometheus_reads_them() -> None:
    with serving("qwen3") as model:
        assert samples(model) == {
            "coati_requests_in_flight": 0,
            "coati_samples_in_flight": 0,
            "coati_prompt_tokens_total": 0,
            "coati_generated_tokens_total": 0,
        }
        usage = model.chat(n=2).json()["usage"]
        assert model.chat(temperature=0.001).status_code == 400
        with model.client.stream("POST", "v1/chat/completions", json={"messages": [USER], "stream": True}) as streamed:
            assert b"[DONE]" in streamed.read()
        assert samples(model) == {
            "coati_requests_in_flight": 0,
            "coati_samples_in_flight": 0,
            "coati_requests_total200": 2,
            "coati_requests_total400": 1,
            "coati_prompt_tokens_total": 2 * usage["prompt_tokens"],
            "coati_generated_tokens_total": 1.5 * usage["completion_tokens"],
        }


def test_health_needs_no_key_and_says_that_the_engine_has_ended_while_metrics_need_the_key() -> None:
    with serving("qwen3") as model:
        anyone = {"headers": {"Authorization": ""}}
        assert model.client.get("health", **anyone).json() == {"status": "ok"}
        assert model.client.get("metrics", **anyone).status_code == 401
        model.engine.close()
        reply = model.client.get("health", **anyone)
        assert (reply.status_code, reply.json()["status"]) == (503, "error")
