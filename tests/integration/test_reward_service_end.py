"""How a reward service starts and ends: refusals before it listens, and nothing left behind after it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.reward_service_process import REPOSITORY, TOKEN, ServiceProcess, all_gone, wait_until

ENDLESS = {"responses": [r"\boxed{\int_0^{\infty} \frac{\ln(x+3)}{x^5+2} dx}"], "problem": {"ground_truth": "5"}}


def refused(*flags: str, token: str | None = TOKEN) -> tuple[int, str]:
    """Exit code and stderr of a service that does not start."""
    environment = {key: value for key, value in os.environ.items() if key != "COATI_REWARD_TOKEN"}
    if token is not None:
        environment["COATI_REWARD_TOKEN"] = token
    command = [sys.executable, "-m", "rewards", "serve", *flags]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.parametrize("token", [None, "", "  ", "two words"])
def test_a_service_without_a_token_does_not_start_and_says_how_to_make_one(token: str | None) -> None:
    code, output = refused("--type", "boxed", "--port", "0", token=token)
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
        (["--type", "boxed", "--host", "no.such.host.invalid"], "cannot listen there"),
        (["--type", "boxed", "--token-file", "/no/such/file"], "--token-file /no/such/file"),
    ],
)
def test_bad_arguments_end_with_exit_2_and_one_message(flags: list[str], complaint: str) -> None:
    code, output = refused(*flags)
    assert code == 2
    assert complaint in output
    assert output.count("\n") == 1


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output = refused("--type", "boxed", "--port", str(port))
    assert code == 2
    assert f"--port {port}: cannot listen there" in output


def test_a_token_file_is_used_and_one_that_others_can_read_is_warned_about(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-the-file\n")
    file.chmod(0o600)
    with ServiceProcess("--token-file", str(file)) as service:
        body = {"responses": [], "problem": {"ground_truth": "5"}}
        assert service.request("POST", "/score", body, token="from-the-file")[0] == 200
        assert service.request("POST", "/score", body, token=TOKEN)[0] == 401
        assert len(service.lines) == 1
    file.chmod(0o644)
    with ServiceProcess("--token-file", str(file)) as service:
        assert "can be read by others" in service.lines[0]


def test_scoring_processes_do_not_inherit_the_token() -> None:
    with ServiceProcess() as service:
        parent, *workers = service.family()
        assert workers
        assert "COATI_REWARD_TOKEN" in parent.environ()
        assert not any("COATI_REWARD_TOKEN" in worker.environ() for worker in workers)


def test_one_line_says_where_a_service_listens_and_only_loopback_goes_without_a_warning() -> None:
    with ServiceProcess() as service:
        (line,) = service.lines
        assert re.fullmatch(r"rewards: serving boxed on http://127\.0\.0\.1:\d+ \(scoring processes: 1\)\n", line)
    with ServiceProcess("--host", "0.0.0.0") as service:
        assert "warning: --host 0.0.0.0 is reachable from other machines and there is no TLS" in service.lines[0]
        assert service.health()["status"] == "ok"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_a_signal_ends_it_cleanly_and_leaves_no_process(number: int, code: int, is_busy: bool) -> None:
    with ServiceProcess("--timeout-s", "60", "--request-timeout-s", "0.2") as service:
        if is_busy:
            assert service.request("POST", "/score", ENDLESS)[0] == 504
            assert service.health()["queued"] == 1
        family = service.family()
        assert len(family) > 1
        assert service.end(number) == code
        wait_until(lambda: all_gone(family), timeout_s=10.0)
        assert service.process.stderr is not None
        assert service.process.stderr.read() == ("rewards: interrupted\n" if code else "")


@pytest.mark.parametrize("body", [b"", json.dumps(ENDLESS).encode()], ids=["body", "scores"])
def test_a_request_that_does_not_finish_is_told_to_come_back_and_holds_up_the_end_for_seconds(body: bytes) -> None:
    head = (
        f"POST /score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(body) or 9}\r\n\r\n"
    )
    with ServiceProcess("--timeout-s", "60") as service:
        family = service.family()
        with socket.create_connection(("127.0.0.1", service.port)) as connection:
            connection.sendall(head.encode() + body)
            wait_until(lambda: service.health()["queued"] == (1 if body else 0))
            assert service.end() == 0
            answer = connection.recv(1 << 16)
        wait_until(lambda: all_gone(family), timeout_s=10.0)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in answer
        assert service.process.stderr is not None
        assert service.process.stderr.read() == ""


def test_a_signal_while_it_starts_ends_it_too() -> None:
    command = [sys.executable, "-m", "rewards", "serve", "--type", "boxed", "--port", "0"]
    environment = {**os.environ, "COATI_REWARD_TOKEN": TOKEN}
    for delay_s in (0.6, 0.8, 1.0):
        with subprocess.Popen(command, cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE) as process:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(delay_s)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) in (0, -signal.SIGTERM)  # the latter while it still imports


def test_a_service_that_is_killed_leaves_no_process() -> None:
    with ServiceProcess() as service:
        family = service.family()
        assert service.end(signal.SIGKILL) == -signal.SIGKILL
        wait_until(lambda: all_gone(family), timeout_s=10.0)
