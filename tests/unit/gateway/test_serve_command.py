"""`coati-rl serve` without episodes: keys, refusals, answers of a real model, ends by signals."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest
from transformers import Lfm2Config, Lfm2ForCausalLM

import coati
import producer.__main__
from coati_rl.command_line import main as command_line
from coati_rl.errors import ConfigError
from producer.__main__ import serve_main

ROOT = Path(__file__).resolve().parents[3]
KEY = "k" * 32


@pytest.fixture
def call(capsys, tmp_path, monkeypatch, model_dir):
    """Run the command in this process, where it has to refuse; returns exit code and message."""
    monkeypatch.setattr(os, "environ", os.environ.copy())

    def run(*flags: str, model: str | None = None):
        code = serve_main([str(model_dir) if model is None else model, *flags], tmp_path)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0: other machines could use the model without a key; set COATI_API_KEY"),
        (["--api-key", "short"], "--api-key: needs at least 16 characters"),
        (["--max-model-len", "100000"], "--max-model-len 100000: the model has 1024 positions; use at most 1024"),
        (["--tool-format", "xml"], "--tool-format"),
        (["--port", "70000"], "--port '70000'"),
        (["--engine-arg", "seed=3"], "--engine-arg seed: cannot be set like this: use --seed"),
        (["--engine-arg", "enable_chunked_prefill=true"], "--engine-arg enable_chunked_prefill=true: on the CPU"),
        (["-b", "fake", "--block-size", "32"], "--block-size 32 without --backend vllm"),
        (["--quantization", "fp9"], "--quantization fp9: vLLM has no such method"),
        (["--temperature", "1"], "--temperature: is a flag of coati-rl rl | generate, and coati-rl serve lacks it"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(call, flags, message) -> None:
    code, printed = call("--device", "cpu", *flags)
    assert code == 2 and printed.startswith(f"coati-rl serve: {message}"), printed


def test_a_model_must_be_named_and_exist(call, capsys, tmp_path) -> None:
    assert serve_main(["--port", "0"], tmp_path) == 2
    assert "--model: which model is served?" in capsys.readouterr().err
    code, printed = call("--device", "cpu", model=str(tmp_path / "none"))
    assert code == 2 and "no such directory" in printed


def test_an_architecture_that_transformers_cannot_decode_in_batches_is_refused(call, tmp_path, tokenizer) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    layers = ["conv", "full_attention"]
    config = Lfm2Config(**sizes, num_key_value_heads=2, vocab_size=len(tokenizer), layer_types=layers)
    config.save_pretrained(tmp_path / "lfm2")
    tokenizer.save_pretrained(tmp_path / "lfm2")
    Lfm2ForCausalLM(config).save_pretrained(tmp_path / "lfm2")
    code, printed = call("--device", "cpu", "-b", "transformers", "--dry-run", model=str(tmp_path / "lfm2"))
    assert code == 2 and "--backend transformers: it cannot generate with --model" in printed
    with pytest.raises(ConfigError, match="it cannot generate with --model"):
        coati.Engine(tmp_path / "lfm2", backend="transformers", max_prompt_tokens=8, max_new_tokens=4)


def test_a_taken_port_is_refused(call) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, printed = call("--device", "cpu", "-b", "fake", "--port", str(taken.getsockname()[1]))
    assert code == 2 and "cannot listen" in printed


def test_a_dry_run_says_what_would_be_served(call, model_dir) -> None:
    code, printed = call("--device", "cpu", "-b", "fake", "--dry-run")
    assert (code, printed) == (
        0,
        f"coati-rl serve: would serve {model_dir} (engine fake, cpu, fp32, 1024 tokens)\n",
    )


def test_the_reward_service_is_reached_by_its_own_name_and_by_its_flag(capsys) -> None:
    for arguments in (["serve-rewards", "--type"], ["serve", "--type"]):
        with pytest.raises(SystemExit) as exit_:
            command_line(arguments)
        assert exit_.value.code == 2
        assert "usage: coati-rl serve" in capsys.readouterr().err


def use(url: str, name: str) -> None:
    """Ask the served model in all ways that there are."""
    with httpx.Client(
        base_url=url, headers={"Authorization": f"Bearer {KEY}"}, trust_env=False, timeout=30, verify=False
    ) as client:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "seed": 3, "logprobs": True}
        first, second = (client.post("chat/completions", json=body).json() for _ in range(2))
        assert first["choices"] == second["choices"] and first["usage"]["completion_tokens"] <= 5
        assert len(first["choices"][0]["logprobs"]["content"]) == first["usage"]["completion_tokens"]
        assert first["model"] == name == client.get("models").json()["data"][0]["id"]
        greedy = client.post("completions", json={"prompt": "Hi", "max_tokens": 2, "temperature": 0, "top_k": 3})
        assert greedy.status_code == 200
        assert client.post("reward", json={"reward": 1}).status_code == 404
        wrong = client.get("models", headers={"Authorization": "Bearer no"})
        assert wrong.status_code == 401


def url_in(line: str) -> str | None:
    found = re.search(r"serving .* on (http://127\.0\.0\.1:\d+/v1)", line)
    return found and found[1]


@pytest.mark.parametrize(("backend", "number", "code"), [("transformers", "SIGTERM", 0), ("fake", "SIGINT", 130)])
def test_a_model_is_served_until_a_signal(model_dir, monkeypatch, backend, number, code) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "COATI_API_KEY": KEY})
    failures: list[BaseException] = []

    def say(text: str, *, prog: str) -> None:
        if url := url_in(text):
            threading.Thread(target=ask, args=(url,)).start()

    def ask(url: str) -> None:
        try:
            use(url, model_dir.name)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)
        os.kill(os.getpid(), signal.Signals[number])

    monkeypatch.setattr(producer.__main__, "print_lines", say)
    try:
        ended = serve_main([str(model_dir), "--port", "0", "--device", "cpu", "-b", backend], model_dir)
    except SystemExit as error:
        ended = error.code
    assert failures == []
    assert ended == code


@pytest.mark.full
def test_the_command_ends_with_its_exit_code_and_leaves_no_process(model_dir) -> None:
    command = [sys.executable, "-m", "producer", "serve", str(model_dir), "--port", "0", "--device", "cpu"]
    for number, code in ((signal.SIGTERM, 0), (signal.SIGINT, 130)):
        environment = {**os.environ, "COATI_API_KEY": KEY}
        process = subprocess.Popen(
            [*command, "-b", "transformers"], cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert process.stderr is not None
        url = next(filter(None, map(url_in, process.stderr)))
        use(url, model_dir.name)
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(30) == code
        assert below and not psutil.wait_procs(below, timeout=10)[1]
