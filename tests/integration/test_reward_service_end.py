"""Test how a reward service starts and ends: refusals before it listens, and nothing left afterwards."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rewards.__main__ import main
from tests.integration.reward_service_process import (
    REPOSITORY,
    TOKEN,
    ServiceProcess,
    all_gone,
    own_reward,
    wait_until,
)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    return own_reward(tmp_path_factory.mktemp("own"))


@pytest.fixture(autouse=True)
def handlers_are_back() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str, token: str | None = TOKEN
) -> tuple[int, str]:
    """Exit code and stderr of a service that does not start."""
    monkeypatch.delenv("COATI_REWARD_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("COATI_REWARD_TOKEN", token)
    code = main(["serve", *flags])
    output = capsys.readouterr()
    assert output.out == ""
    return code, output.err


@pytest.mark.parametrize("token", [None, "", "  ", "two words", "x", "eleven-long"])
def test_a_service_without_a_token_does_not_start_and_says_how_to_make_one(
    token: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = refused(monkeypatch, capsys, "--type", "boxed", "--port", "0", token=token)
    assert code == 2
    assert "COATI_REWARD_TOKEN holds" in output
    assert "secrets.token_hex" in output
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--type", "box"], "unknown reward 'box'"),
        (["--type", "boxed", "--num-workers", "0"], "--num-workers is 0"),
        (["--type", "boxed", "--timeout-s", "nan"], "--timeout-s is nan"),
        (["--type", "boxed", "--max-queued", "0"], "--max-queued is 0"),
        (["--type", "boxed", "--max-body-mb", "-1"], "--max-body-mb is -1"),
        (["--type", "boxed", "--request-timeout-s", "0"], "--request-timeout-s is 0"),
        (["--type", "boxed", "--port", "70000"], "--port is 70000"),
        (["--type", "boxed", "--host", "no.such.host.invalid"], "cannot listen: "),
        (["--type", "boxed", "--token-file", "/no/such/file"], "--token-file /no/such/file"),
    ],
)
def test_bad_arguments_end_with_exit_2_and_one_message(
    flags: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = refused(monkeypatch, capsys, *flags)
    assert code == 2
    assert complaint in output
    assert output.count("\n") == 1


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output = refused(monkeypatch, capsys, "--type", "boxed", "--port", str(port))
    assert code == 2
    assert f"--port {port}: cannot listen: " in output


@pytest.mark.full
def test_a_refusal_is_the_exit_code_of_the_process() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "COATI_REWARD_TOKEN"}
    command = [sys.executable, "-m", "rewards", "serve", "--type", "boxed"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_a_token_file_that_others_can_read_is_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rewards.commands import serve_command  # brings FastAPI, which collecting tests can do without

    file = tmp_path / "token"
    file.write_text("from-the-file\n")
    for mode, warning in ((0o600, ""), (0o644, "can be read by other users; run chmod 600")):
        file.chmod(mode)
        assert serve_command._read_token(file) == "from-the-file"
        said = capsys.readouterr().err
        assert warning in said and bool(warning) == bool(said)


def test_only_loopback_goes_without_a_warning() -> None:
    from coati_rl.processes.http_server import listen_as_told  # brings uvicorn, which collecting tests can do without

    said = list[str]()
    for host, warning in (
        ("127.0.0.1", ""),
        ("0.0.0.0", "--host 0.0.0.0 is reachable from other machines"),
    ):
        with listen_as_told(host, 0, say=said.append, what="token") as listener:
            socket.create_connection(("127.0.0.1", listener.getsockname()[1])).close()
        assert warning in "".join(said) and bool(warning) == bool(said)


@pytest.mark.full
def test_one_line_says_where_it_listens_the_token_stays_its_own_and_sigterm_leaves_no_process(
    own: str, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("from-the-file\n")
    file.chmod(0o600)
    with ServiceProcess("--token-file", str(file), reward_type=own, host="127.0.0.1") as service:
        (line,) = service.lines
        assert re.fullmatch(
            r"rewards: serving \S*own\.py:score on http://127\.0\.0\.1:\d+ \(scoring processes: 1\)\n", line
        )
        body = {"responses": [], "problem": {"ground_truth": "5"}}
        assert service.request("POST", "/score", body, token="from-the-file")[0] == 200
        assert service.request("POST", "/score", body, token=TOKEN)[0] == 401
        family = parent, *workers = service.family()
        assert workers
        assert "COATI_REWARD_TOKEN" in parent.environ()
        assert not any("COATI_REWARD_TOKEN" in worker.environ() for worker in workers)
        assert service.end() == 0
        wait_until(lambda: all_gone(family))
        assert service.process.stderr is not None
        assert service.process.stderr.read() == ""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_ctrl_c_ends_it_cleanly_and_leaves_no_process(own: str, is_busy: bool) -> None:
    with ServiceProcess("--timeout-s", "600", "--request-timeout-s", "0.2", reward_type=own) as service:
        if is_busy:
            body = {"responses": ["sleep"], "problem": {"ground_truth": "5"}}
            assert service.request("POST", "/score", body)[0] == 504
            assert service.health()["queued"] == 1
        family = service.family()
        assert len(family) > 1
        assert service.end(signal.SIGINT) == 130
        wait_until(lambda: all_gone(family))
        assert service.process.stderr is not None
        assert service.process.stderr.read() == "rewards: interrupted\n"


@pytest.mark.full
def test_requests_that_do_not_finish_are_told_to_come_back_and_hold_up_the_end_for_seconds(own: str) -> None:
    endless = json.dumps({"responses": ["sleep"], "problem": {"ground_truth": "5"}}).encode()
    with ServiceProcess("--timeout-s", "600", reward_type=own) as service, ExitStack() as stack:
        family = service.family()
        connections = []
        for body in (b"", endless):  # one waits for the body, one for the scores
            connections.append(stack.enter_context(socket.create_connection(service.address)))
            head = (
                f"POST /score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
                f"Content-Length: {len(body) or 9}\r\n\r\n"
            )
            connections[-1].sendall(head.encode() + body)
        wait_until(lambda: service.health()["queued"] == 1)
        assert service.end() == 0
        for connection in connections:
            answer = connection.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 1\r\n" in answer
        wait_until(lambda: all_gone(family))
        assert service.process.stderr is not None
        assert service.process.stderr.read() == ""


def test_a_signal_while_it_starts_ends_it_too() -> None:
    command = [sys.executable, "-m", "rewards", "serve", "--type", "boxed", "--port", "0"]
    environment = {**os.environ, "COATI_REWARD_TOKEN": TOKEN}
    processes = [
        subprocess.Popen(command, cwd=REPOSITORY, env=environment, stderr=subprocess.DEVNULL) for _ in range(3)
    ]
    for process in processes:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)  # the second and the third are so much further
        process.send_signal(signal.SIGTERM)
    assert all(process.wait(60) in (0, -signal.SIGTERM) for process in processes)  # the latter while it imports
