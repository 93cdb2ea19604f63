"""A served model from creation to samples, as Tinker's client speaks: order, owners, checkpoints, mistakes."""

import json
import urllib.request

import numpy as np
import pyarrow
import pytest

from coati_rl.tinker.messages import MESSAGES
from tests.tinker_client import Client, loss_body, loss_sum, server

ROWS = [[5, 9, 7, 3, 30, 31], [8, 4, 6]]


@pytest.fixture(scope="module")
def running(model_dir, tmp_path_factory):
    flags = ("--max-models", "40", "--save-steps", "3", "--poll-s", "0.5")
    with server(model_dir, tmp_path_factory.mktemp("tinker"), *flags) as process:
        yield process


@pytest.fixture
def anna(running):
    return Client(running.port)


@pytest.fixture
def bert(running):
    return Client(running.port, "tml-of-bert-0123456789")


@pytest.fixture
def session(anna):
    return anna.session()


def train(client, model, first, steps=3):
    """Losses of steps whose requests begin at number `first`."""
    losses = []
    for step in range(steps):
        asked = client.send_loss(model, first + 2 * step, ROWS)
        stepped = client.step(model, first + 2 * step + 1)
        losses.append(client.wait(asked))
        assert "grad_norm:mean" in client.wait(stepped)["metrics"]
    return losses


def test_a_model_learns_and_its_sampler_has_the_trainer_s_log_probabilities(anna, session):
    model = anna.model(session)
    losses = [loss_sum(each) for each in train(anna, model, 1, steps=6)]
    assert losses[-1] < 0.7 * losses[0]
    sampler = anna.sampler(model, 13, 0)
    prompt = [int(each) for each in np.random.default_rng(0).integers(3, 200, 200)]
    found = anna.sample(sampler, 0, prompt, samples=2, max_tokens=6, stop=[])
    tokens = [np.frombuffer(each.tokens, "<i4").tolist() for each in found.sequences]
    assert [len(each) for each in tokens] == [6, 6] and tokens[0] != tokens[1]
    answer = anna.wait(anna.send_loss(model, 14, [prompt + each for each in tokens]))
    record = MESSAGES["ForwardBackwardOutput"].FromString(answer).loss_fn_outputs[0].fields["logprobs"]
    trained = np.frombuffer(record.data, "<f4").reshape(2, -1)[:, -6:]
    sampled = np.array([np.frombuffer(each.logprobs, "<f4") for each in found.sequences])
    assert np.abs(trained - sampled).max() < 1e-4


def test_requests_that_arrive_in_another_order_are_computed_in_theirs_and_once(anna, session):
    ordered, shuffled = anna.model(session, 0, seed=7), anna.model(session, 1, seed=7)
    losses = train(anna, ordered, 1, steps=2)
    asked = {4: anna.step(shuffled, 4), 3: anna.send_loss(shuffled, 3, ROWS), 2: anna.step(shuffled, 2)}
    assert anna.call("POST", "retrieve_future", json.dumps({"request_id": asked[3]["request_id"]}).encode())[0] == 408
    asked[1] = anna.send_loss(shuffled, 1, ROWS)  # the first one arrives last
    again = anna.send_loss(shuffled, 3, ROWS), anna.send_loss(shuffled, 1, ROWS)
    assert [each["request_id"] for each in again] == [asked[3]["request_id"], asked[1]["request_id"]]
    assert [anna.wait(asked[1]), anna.wait(asked[3])] == losses
    anna.wait(asked[4])
    assert anna.wait(anna.send_loss(shuffled, 5, ROWS)) == anna.wait(anna.send_loss(ordered, 5, ROWS))


def test_models_beside_each_other_get_the_bits_that_each_gets_alone(anna, session):
    alone = [train(anna, anna.model(session, number, seed=number), 1) for number in range(3)]
    models = [anna.model(session, 10 + number, seed=number) for number in range(3)]
    asked = [
        [(anna.send_loss(model, 1 + 2 * step, ROWS), anna.step(model, 2 + 2 * step))[0] for model in models]
        for step in range(3)
    ]
    together = [[anna.wait(asked[step][number]) for step in range(3)] for number in range(3)]
    assert together == alone


def test_a_loaded_checkpoint_goes_on_to_the_same_bits(anna, session):
    model = anna.model(session)
    train(anna, model, 1)
    path = anna.wait(anna.post("save_weights", model_id=model, seq_id=7, path="one"))["path"]
    assert path == f"tinker://{model}/weights/one"
    loaded = anna.post("load_weights", session_id=session, model_seq_id=1, path=path, optimizer=True)
    other = anna.wait(loaded)["model_id"]
    assert train(anna, other, 1) == train(anna, model, 8)


def test_a_snapshot_keeps_its_weights_and_an_inflight_sampler_follows_its_model(anna, session):
    model = anna.model(session)
    snapshot, inflight = anna.sampler(model, 1, 0), anna.sampler(model, 2, 1, kind="inflight")
    before = [anna.sample(each, 0, [5, 6, 7], temperature=0).SerializeToString() for each in (snapshot, inflight)]
    assert before[0] == before[1]
    train(anna, model, 3, steps=5)
    second = anna.sampler(model, 13, 2, kind="inflight")
    after = [anna.sample(each, 9, [5, 6, 7], temperature=0) for each in (snapshot, inflight, second)]
    assert after[0].SerializeToString() == before[0]
    assert after[1] == after[2] != after[0]


def test_another_key_finds_nothing_of_it(anna, bert, session):
    model = anna.model(session)
    sampler = anna.sampler(model, 1, 0)
    path = anna.wait(anna.post("save_weights", model_id=model, seq_id=2, path="mine"))["path"]
    asked = anna.step(model, 3)
    own = bert.session()
    tries = {
        "session_heartbeat": {"session_id": session},
        "create_model": {"session_id": session, "model_seq_id": 5, "base_model": "tiny", "lora_config": {"rank": 2}},
        "get_info": {"model_id": model},
        "optim_step": {"model_id": model, "seq_id": 4, "adam_params": {}},
        "save_weights": {"model_id": model, "seq_id": 4},
        "load_weights": {"session_id": own, "model_seq_id": 0, "path": path, "optimizer": True},
        "create_sampling_session": {"session_id": own, "sampling_session_seq_id": 0, "model_path": path},
        "asample": {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}},
        "retrieve_future": asked,
        "weights_info": {"tinker_path": path},
        "join_sampling_session": {"sampling_session_id": sampler},
    }
    assert {name: bert.refused(name, **body)[0] for name, body in tries.items()} == {
        name: 410 if name == "session_heartbeat" else 404 for name in tries
    }
    assert (
        bert.call("POST", "forward_backward", loss_body(model, 4, ROWS), Content_Type="application/x-protobuf")[0]
        == 404
    )
    for verb, url in (("GET", ""), ("DELETE", "/checkpoints/weights/mine"), ("PUT", "/checkpoints/weights/mine/ttl")):
        assert bert.call(verb, f"training_runs/{model}{url}", b'{"ttl_seconds": null}')[0] == 404
    assert json.loads(bert.call("GET", "checkpoints")[1])["checkpoints"] == []
    assert Client(anna.port, "tml-of-nobody-0123456").refused("create_session", sdk_version="1")[0] == 401
    assert "metrics" in anna.wait(asked)
    anna.call("POST", f"training_runs/{model}/checkpoints/weights/mine/publish")
    assert "model_id" in bert.wait(bert.post("load_weights", **tries["load_weights"]))
    assert bert.call("DELETE", f"training_runs/{model}/checkpoints/weights/mine")[0] == 404


def test_checkpoints_are_listed_handed_out_expire_and_are_deleted(anna, session, running):
    model = anna.model(session)
    train(anna, model, 1, steps=1)
    anna.wait(anna.post("save_weights", model_id=model, seq_id=3, path="a"))
    anna.wait(anna.post("save_weights_for_sampler", model_id=model, seq_id=4, path="b", ttl_seconds=4000))
    run = f"training_runs/{model}"
    listed = json.loads(anna.call("GET", f"{run}/checkpoints")[1])["checkpoints"]
    kinds = [(each["checkpoint_id"], each["checkpoint_type"], bool(each["expires_at"])) for each in listed]
    assert kinds == [("weights/a", "training", False), ("sampler_weights/b", "sampler", True)]
    assert json.loads(anna.call("GET", run)[1])["lora_rank"] == 4
    urls = json.loads(anna.call("GET", f"{run}/checkpoints/weights/a/external_weights_urls")[1])["urls"]
    config = json.loads(urllib.request.urlopen(urls["adapter_config.json"]).read())
    assert (config["peft_type"], config["r"]) == ("LORA", 4)
    forged = urls["adapter_config.json"].replace("adapter_config.json", "tinker.json")
    assert anna.call("GET", forged.partition("/api/v1/")[2])[0] == 404
    assert anna.call("PUT", f"{run}/checkpoints/weights/a/ttl", b'{"ttl_seconds": 1}')[0] == 204
    asked = anna.post("save_weights", model_id=model, seq_id=5, path="b")
    assert anna.wait(asked)["path"].endswith("weights/b")
    refused = anna.wait(anna.post("save_weights", model_id=model, seq_id=6, path="b"))
    assert refused["category"] == "user" and "overwrite=True" in refused["error"]
    overwritten = anna.post("save_weights", model_id=model, seq_id=7, path="b", overwrite=True)
    assert anna.wait(overwritten)["path"].endswith("weights/b")
    assert anna.call("DELETE", f"{run}/checkpoints/weights/b")[0] == 204
    assert anna.refused("weights_info", tinker_path=f"tinker://{model}/weights/b")[0] == 404


def test_a_mistake_is_one_answer_that_is_not_repeated_and_the_model_goes_on(anna, session):
    model = anna.model(session)
    losses = ["stable_reinforce", "cross_entropy", "importance_sampling", "cross_entropy"]
    rows = [ROWS, [[5, 999999]], ROWS, ROWS]
    answers = [
        anna.wait(anna.send_loss(model, n + 1, r, loss)) for n, (r, loss) in enumerate(zip(rows, losses, strict=True))
    ]
    assert [each["category"] for each in answers[:3]] == ["user"] * 3
    assert loss_sum(answers[3]) > 0
    bad = [{"learning_rate": -1}, {"beta1": 2}, {"learning_rate": "much"}]
    for seq, params in enumerate(bad, 5):
        answer = anna.wait(anna.post("optim_step", model_id=model, seq_id=seq, adam_params=params))
        assert answer["category"] == "user" and next(iter(params)) in answer["error"]
    answer = anna.wait(anna.post("save_weights", model_id=model, seq_id=8, path="../../etc"))
    assert "letters, digits" in answer["error"]
    assert loss_sum(anna.wait(anna.send_loss(model, 9, ROWS))) == loss_sum(answers[3])
    for name in ("nope", "tinker://x/weights/y", "tinker://../weights/y", "tinker://a:train:0/weights/.."):
        asked = {"session_id": session, "model_seq_id": 9, "path": name, "optimizer": False}
        assert anna.refused("load_weights", **asked)[0] in (400, 404)


def test_an_old_client_a_large_body_and_an_unknown_path_get_one_clear_message(anna, session):
    status, data, _ = anna.call("POST", "forward_backward", b"{}", Content_Type="application/json")
    assert status == 400 and "upgrade tinker" in json.loads(data)["error"]
    assert anna.refused("no_such_call")[0] == 404
    asked = {"session_id": session, "model_seq_id": 3, "base_model": "other", "lora_config": {"rank": 2}}
    assert anna.refused("create_model", **asked) == (404, "base_model 'other' is not served here; use tiny")


def test_a_compressed_body_is_read_and_a_bomb_is_refused(anna, session):
    model = anna.model(session)

    whole = pyarrow.compress(loss_body(model, 1, ROWS), "zstd", asbytes=True)
    headers = {"Content_Type": "application/x-protobuf", "Content_Encoding": "zstd"}
    status, data, _ = anna.call("POST", "forward_backward", whole, **headers)
    assert status == 200 and loss_sum(anna.wait(json.loads(data))) > 0
    bomb = pyarrow.compress(bytes(2**29), "zstd", asbytes=True)
    assert anna.call("POST", "forward_backward", bomb, **headers)[0] == 413
    assert anna.call("POST", "forward_backward", b"junk", **headers)[0] == 400


def test_stops_prompt_log_probabilities_and_the_base_model(anna, session):
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = anna.post("create_sampling_session", **asked)["sampling_session_id"]
    free = anna.sample(sampler, 0, [5, 6, 7], stop=[], temperature=0)
    tokens = np.frombuffer(free.sequences[0].tokens, "<i4").tolist()
    assert (len(tokens), free.sequences[0].stop_reason) == (8, 1)
    stopped = anna.sample(sampler, 1, [5, 6, 7], stop=[tokens[2]], temperature=0).sequences[0]
    found = np.frombuffer(stopped.tokens, "<i4").tolist()
    assert found == tokens[: tokens.index(tokens[2]) + 1] and stopped.stop_reason == 0
    body = {"sampling_session_id": sampler, "seq_id": 2, "prompt": {"chunks": [{"tokens": [5, 6]}, {"tokens": [7]}]}}
    params = {"sampling_params": {"max_tokens": 1}, "prompt_logprobs": True, "topk_prompt_logprobs": 2}
    scored = MESSAGES["SampleResponse"].FromString(anna.wait(anna.post("asample", **body, **params)))
    logprobs = np.frombuffer(scored.prompt_logprobs, "<f4")
    assert np.isnan(logprobs[0]) and (logprobs[1:] < 0).all() and scored.topk_prompt_logprobs.k == 2
    for wrong in ({"tokens": [10**6]}, {"tokens": []}, {"asset": "image"}):
        assert anna.refused("asample", **{**body, "seq_id": 3, "prompt": {"chunks": [wrong]}})[0] in (400, 422)


def test_a_session_that_finishes_frees_its_models_and_leaves_its_checkpoints(anna):
    session = anna.session()
    model = anna.model(session)
    path = anna.wait(anna.post("save_weights", model_id=model, seq_id=1, path="kept"))["path"]
    anna.post(f"sessions/{session}/finish", type="success")
    assert anna.refused("session_heartbeat", session_id=session)[0] == 410
    assert anna.refused("get_info", model_id=model)[0] == 404
    assert anna.post("weights_info", tinker_path=path)["lora_rank"] == 4
