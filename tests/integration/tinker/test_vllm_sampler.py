"""`--sampler vllm`: samples have the trainer's log-probabilities after each publishing; what vLLM lacks is named."""

import json

import numpy as np
import pytest

from coati_rl.tinker.messages import MESSAGES
from tests.tinker_client import Client, server

pytestmark = pytest.mark.full  # a start of vLLM

TOLERANCE = 1e-4  # nats
PROMPT = [int(each) for each in np.random.default_rng(0).integers(3, 200, 200)]
ROWS = [PROMPT[:40], PROMPT[100:120]]


@pytest.fixture(scope="module")
def client(model_dir, tmp_path_factory):
    with server(model_dir, tmp_path_factory.mktemp("tinker"), "--sampler", "vllm", "--max-tokens", "512") as process:
        yield Client(process.port)


@pytest.fixture
def session(client):
    return client.session()


def trained_logprobs(client, model, seq, rows):
    answer = client.wait(client.send_loss(model, seq, rows))
    record = MESSAGES["ForwardBackwardOutput"].FromString(answer).loss_fn_outputs[0].fields["logprobs"]
    return np.frombuffer(record.data, "<f4").reshape(len(rows), -1)


def tokens_of(found):
    return [np.frombuffer(each.tokens, "<i4").tolist() for each in found.sequences]


def test_sampler_and_trainer_agree_after_each_publishing_with_a_cached_prompt(client, session):
    models = [client.model(session, number, train_unembed=False) for number in range(2)]
    seen = []
    for version in range(4):
        first = 1 + 4 * version
        for number, model in enumerate(models):
            client.send_loss(model, first, ROWS)
            client.wait(client.step(model, first + 1, rate=2e-2))
            sampler = client.sampler(model, first + 2, 10 * version + number)
            found = [
                client.sample(sampler, seq, PROMPT, samples=2, max_tokens=6, stop=[], temperature=temperature)
                for seq, temperature in enumerate((1.0, 0.7))  # the second finds the prompt in the cache
            ]
            tokens = [each for one in found for each in tokens_of(one)]
            sampled = np.array([np.frombuffer(each.logprobs, "<f4") for one in found for each in one.sequences])
            expected = trained_logprobs(client, model, first + 3, [PROMPT + each for each in tokens])[:, -6:]
            assert np.abs(expected - sampled).max() < TOLERANCE
            seen.append(sampled)
    assert all(np.abs(one - other).max() > 100 * TOLERANCE for one, other in zip(seen, seen[2:], strict=False))


def test_the_base_and_a_prompt_have_their_own_log_probabilities(client, session):
    """Of a model whose B is 0, a sampler has the base's weights."""
    model = client.model(session, train_unembed=False)
    expected = trained_logprobs(client, model, 1, [PROMPT])[0]
    asked = {"session_id": session, "sampling_session_seq_id": 1, "base_model": "tiny"}
    base = client.post("create_sampling_session", **asked)["sampling_session_id"]
    for sampler in (base, client.sampler(model, 2, 2)):
        body = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 1, "prompt_logprobs": True}
        body |= {"prompt": {"chunks": [{"tokens": PROMPT}]}, "sampling_params": {"max_tokens": 1}}
        found = MESSAGES["SampleResponse"].FromString(client.wait(client.post("asample", **body)))
        assert np.abs(np.frombuffer(found.prompt_logprobs, "<f4")[1:] - expected).max() < TOLERANCE


def test_stops_are_those_of_the_request(client, session):
    sampler = client.sampler(client.model(session, train_unembed=False), 1, 0)
    (free,) = tokens_of(client.sample(sampler, 0, [5, 6, 7], max_tokens=8, stop=[]))
    stopped = client.sample(sampler, 1, [5, 6, 7], max_tokens=8, stop=[free[3]])
    assert tokens_of(stopped) == [free[: free.index(free[3]) + 1]]
    assert stopped.sequences[0].stop_reason == 0


@pytest.mark.parametrize(
    ("lora", "message"),
    [({}, "train_unembed=False"), ({"rank": 0}, "rank=0"), ({"rank": 65, "train_unembed": False}, "rank=65")],
)
def test_what_vllm_cannot_serve_is_named_with_a_remedy(client, session, lora, message):
    model = client.model(session, **lora)
    body = {"sampling_session_id": client.sampler(model, 1, 0), "seq_id": 0, "sampling_params": {"max_tokens": 1}}
    answer = client.wait(client.post("asample", **body, prompt={"chunks": [{"tokens": [5]}]}))
    assert message in answer["error"] and "--sampler transformers" in answer["error"], json.dumps(answer)
