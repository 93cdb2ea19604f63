"""`coati-rl serve` without episodes: keys, refusals, answers of a real model, ends by signals."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx2 as httpx
import pytest

from coati_rl.command_line import main as command_line
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
        (["-b", "transformers", "-ptp", "2"], "-ptp 2: only vllm is tensor parallel; use -b vllm"),
        (["--port", "70000"], "--port '70000'"),
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


def start(model_dir: Path, *flags: str, **environment: str) -> tuple[subprocess.Popen, str]:
    """Start the command; returns it and its URL."""
    command = [sys.executable, "-m", "producer", "serve", str(model_dir), "--port", "0", "--device", "cpu", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"serving .* on (http://127\.0\.0\.1:\d+/v1)", line):
            return process, found[1]
    raise AssertionError(f"it ended with {process.wait()}")


@pytest.mark.parametrize(("backend", "number", "code"), [("transformers", "SIGTERM", 0), ("fake", "SIGINT", 130)])
def test_a_model_is_served_until_a_signal(model_dir, backend, number, code) -> None:
    process, url = start(model_dir, "-b", backend, COATI_API_KEY=KEY)
    try:
        client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, trust_env=False, timeout=30)
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "seed": 3, "logprobs": True}
        first, second = (client.post("chat/completions", json=body).json() for _ in range(2))
        assert first["choices"] == second["choices"] and first["usage"]["completion_tokens"] <= 5
        assert len(first["choices"][0]["logprobs"]["content"]) == first["usage"]["completion_tokens"]
        assert first["model"] == model_dir.name
        assert client.get("models").json()["data"][0]["id"] == model_dir.name
        assert client.post("completions", json={"prompt": "Hi", "max_tokens": 2, "temperature": 0}).status_code == 200
        assert client.post("reward", json={"reward": 1}).status_code == 404
        wrong = httpx.get(f"{url}/models", headers={"Authorization": "Bearer no"}, trust_env=False)
        assert wrong.status_code == 401
        process.send_signal(signal.Signals[number])
        assert process.wait(20) == code
    finally:
        process.kill()
        process.wait()
