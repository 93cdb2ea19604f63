"""Test `coati-rl serve` with two adapters on one base: each answers as transformers with PEFT's merged weights does."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from coati_rl.model_files.identity import adapter_identity, model_identity
from tests.adapter_dirs import save_adapter
from tests.integration.engines.conftest import VOCAB_SIZE, save_checkpoint

pytestmark = pytest.mark.full  # test_vllm_adapters.py has one such engine in the fast suite

PROMPT = [*range(40, 60)]
RANKS = {"one": 4, "two": 9}
TOLERANCE = 2e-4  # nats


def save_words(directory: Path) -> None:
    """A tokenizer of words, so that the text of each token tells its id."""
    words = {f"w{index}": index for index in range(VOCAB_SIZE)}
    inner = Tokenizer(WordLevel(words, unk_token="w2"))
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w0", pad_token="w1").save_pretrained(directory)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, PreTrainedModel]]:
    """Directories and models by name; the adapters are of different ranks and layers."""
    root = tmp_path_factory.mktemp("served")
    base = save_checkpoint(root / "base", 0, tied=True)
    save_words(base)
    plain = AutoModelForCausalLM.from_pretrained(base)
    one = save_adapter(root / "adapter-1", plain, seed=1)
    two = save_adapter(root / "adapter-2", plain, seed=2, r=9, target_modules=["q_proj", "down_proj"])
    return {"base": (base, plain), "one": (root / "adapter-1", one), "two": (root / "adapter-2", two)}


@pytest.fixture(scope="module")
def client(models: dict[str, tuple[Path, PreTrainedModel]]) -> Iterator[httpx.Client]:
    adapters = ",".join(f"{name}={models[name][0]}" for name in RANKS)
    flags = ["--adapter", adapters, "--port", "0", "--device", "cpu", "--max-model-len", "128"]
    command = [sys.executable, "-m", "producer", "serve", str(models["base"][0]), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        printed = []
        for line in server.stdout or ():
            printed.append(line)
            if found := re.search(r"serving .*base, one, two .* on (http://127\.0\.0\.1:\d+)/v1", line):
                break
        else:
            pytest.fail("".join(printed[-20:]))
        with httpx.Client(base_url=found[1], trust_env=False, timeout=60, verify=False) as client:
            yield client
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def ask(client: httpx.Client, name: str, **more: Any) -> Any:
    body = {"model": name, "prompt": PROMPT, "max_tokens": 8, "seed": 3, "logprobs": 0, **more}
    return client.post("v1/completions", json=body).json()


def gap(reply: Any, model: PreTrainedModel) -> float:
    """The largest difference of the answer's log-probabilities to a model's, in nats."""
    told = reply["choices"][0]["logprobs"]
    answer = [int(token[1:] or 0) for token in told["tokens"]]  # the end has no text
    with torch.no_grad():
        logprobs = model(torch.tensor([PROMPT + answer])).logits[0].log_softmax(-1)
    places = range(len(PROMPT) - 1, len(PROMPT) + len(answer) - 1)
    right = [float(logprobs[place, token]) for place, token in zip(places, answer, strict=True)]
    return max(abs(a - b) for a, b in zip(right, told["token_logprobs"], strict=True))


@pytest.mark.parametrize("name", ["two", "base", "one", "two", "base"])
def test_the_model_that_a_request_names_answers(client: httpx.Client, models: Any, name: str) -> None:
    directory = models[name][0]
    base = models["base"][0]
    reply = ask(client, name)
    identity = model_identity(base) if name == "base" else adapter_identity(directory, model_identity(base))
    assert (reply["model"], reply["system_fingerprint"]) == (name, identity[:16])
    gaps = {key: gap(reply, each) for key, (_, each) in models.items()}
    assert all((gaps[key] < TOLERANCE) == (key == name) for key in models), gaps


def test_requests_of_all_models_at_a_time_get_their_own(client: httpx.Client, models: Any) -> None:
    names = ["base", "one", "two"] * 4
    with ThreadPoolExecutor(len(names)) as pool:
        replies = pool.map(lambda seed: ask(client, names[seed], seed=seed, max_tokens=24), range(len(names)))
        gaps = [gap(reply, models[name][1]) for name, reply in zip(names, replies, strict=True)]
    assert max(gaps) < TOLERANCE, dict(zip(names, gaps, strict=False))


def test_streams_and_lists_name_what_answers_and_an_unknown_name_is_404(client: httpx.Client) -> None:
    whole = ask(client, "one")["system_fingerprint"]
    body = {"model": "one", "prompt": PROMPT, "max_tokens": 2, "stream": True}
    events = client.post("v1/completions", json=body).text
    assert set(re.findall(r'"system_fingerprint": ?"(\w+)"', events)) == {whole}
    assert [each["id"] for each in client.get("v1/models").json()["data"]] == ["base", "one", "two"]
    refused = client.post("v1/completions", json={"model": "three", "prompt": "a"})
    assert refused.status_code == client.get("v1/models/three").status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"
