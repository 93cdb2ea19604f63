"""Test client and service together: sharing, a full queue, and a service that is killed and restarted."""

import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from coati_rl.errors import ConfigError
from coati_rl.types import Problem
from rewards.remote.client import RemoteScorer, check_service
from tests.integration.reward_service_process import HOST, TOKEN, ServiceProcess, all_gone, own_reward, wait_until

FIVE = Problem(ground_truth="5")
GROUP = ["5", "6", "no number"]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    return own_reward(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def service(own: str) -> Iterator[ServiceProcess]:
    with ServiceProcess("--timeout-s", "1", reward_type=own) as running:
        yield running


def test_two_clients_share_a_service_and_none_gets_the_scores_of_the_other(service: ServiceProcess, own: str) -> None:
    clients = [RemoteScorer(service.url, token=TOKEN, reward_type=own) for _ in range(2)]
    futures = [
        clients[number % 2].submit([str(number), "x", str(number + 1)], Problem(ground_truth=str(number)))
        for number in range(60)
    ]
    verdicts = {tuple(score.verdict for score in future.result(60)) for future in futures}
    for client in clients:
        client.close()
    assert verdicts == {("ok", "wrong", "wrong")}


@pytest.mark.full
def test_a_full_queue_makes_the_client_wait_and_succeed(own: str) -> None:
    with ServiceProcess("--timeout-s", "1", "--max-queued", "1", reward_type=own) as service:
        scorer = RemoteScorer(service.url, token=TOKEN, timeout_s=60.0)
        slow = scorer.submit(["sleep"], FIVE)
        wait_until(lambda: service.health()["queued"] == 1)
        assert service.request("POST", "/score", {"responses": ["x"], "problem": {"ground_truth": "5"}})[0] == 503
        others = [scorer.submit(GROUP, FIVE) for _ in range(2)]
        assert [score.verdict for score in slow.result(60)] == ["invalid"]
        for future in others:
            assert [score.verdict for score in future.result(60)] == ["ok", "wrong", "wrong"]
        scorer.close()


@pytest.mark.full
def test_a_service_that_is_killed_makes_groups_invalid_in_time_and_scores_again_when_it_is_back(own: str) -> None:
    patient, impatient = {"token": TOKEN, "timeout_s": 120.0}, {"token": TOKEN, "timeout_s": 2.0}
    with ServiceProcess("--timeout-s", "600", reward_type=own) as service:
        family = service.family()
        scorer = RemoteScorer(service.url, **impatient)  # type: ignore[arg-type]
        lost = [scorer.submit(["sleep", "5"], FIVE) for _ in range(3)]
        wait_until(lambda: service.health()["queued"] == 6)
        assert service.end(signal.SIGKILL) == -signal.SIGKILL
        scores = [score for future in lost for score in future.result(60)]
        assert [(score.verdict, score.reward) for score in scores] == [("invalid", 0.0)] * 6
        assert "the reward service: " in scores[0].detail
        wait_until(lambda: all_gone(family))
        scorer.close()

    scorer = RemoteScorer(service.url, **patient)  # type: ignore[arg-type]
    future = scorer.submit(GROUP, FIVE)  # while it is away
    with ServiceProcess("--timeout-s", "600", reward_type=own, port=service.address[1]) as service:
        assert [score.verdict for score in future.result(60)] == ["ok", "wrong", "wrong"]
        # One that is told to end breaks off what does not finish. The group is not lost: it is asked for again.
        future = scorer.submit(["sleep", "5"], FIVE)
        wait_until(lambda: service.health()["queued"] > 0)
        assert service.end() == 0
        assert not future.done()

    with ServiceProcess("--timeout-s", "0.5", reward_type=own, port=service.address[1]) as service:
        scores = future.result(60)
        assert [score.verdict for score in scores] == ["invalid", "ok"]
        assert scores[0].detail == "timed out after 0.5 s"
        # It lets requests in flight finish.
        future = scorer.submit(["sleep", "5"], FIVE)
        wait_until(lambda: service.health()["queued"] == 2)
        service.process.send_signal(signal.SIGTERM)
        assert [score.verdict for score in future.result(60)] == ["invalid", "ok"]
        assert service.process.wait(60) == 0
    scorer.close()


def test_closing_the_client_does_not_wait_for_the_service(service: ServiceProcess) -> None:
    scorer = RemoteScorer(service.url, token=TOKEN)
    scorer.submit(["sleep"] * 3, FIVE)
    wait_until(lambda: service.health()["queued"] == 3)
    scorer.close()
    assert service.health()["queued"] > 0
    wait_until(lambda: service.health()["queued"] == 0)


def test_the_check_accepts_a_service_and_names_a_wrong_token_and_a_wrong_reward_type(
    service: ServiceProcess, own: str
) -> None:
    check_service(service.url, token=TOKEN, reward_type=own)
    check_service(service.url, token=TOKEN)
    with pytest.raises(ConfigError, match=r"status 401.*wrong token.*set COATI_REWARD_TOKEN"):
        check_service(service.url, token="wrong", reward_type=own)
    with pytest.raises(ConfigError, match=r"the service scores '.*own\.py:score', this run needs 'code'"):
        check_service(service.url, token=TOKEN, reward_type="code")


@pytest.mark.full
def test_the_check_waits_for_a_service_that_is_being_started(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewards.remote.client._CHECK_S", 60.0)  # for a busy machine
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    started: list[ServiceProcess] = []
    thread = threading.Thread(target=lambda: started.append(ServiceProcess(reward_type=own, port=port)))
    thread.start()
    try:
        assert not started, "nobody listens yet: the imports alone take longer"
        check_service(f"http://{HOST}:{port}", token=TOKEN, reward_type=own)
    finally:
        thread.join(60)
        with started[0] as second:
            assert second.address == (HOST, port)


def test_a_connection_is_used_again(service: ServiceProcess) -> None:
    scorer = RemoteScorer(service.url, token=TOKEN)
    connections = set()
    for _ in range(10):
        scorer.submit(["5"], FIVE).result(60)
        connections |= {
            connection.raddr
            for connection in service.family()[0].net_connections(kind="tcp")
            if connection.status == "ESTABLISHED"
        }
    scorer.close()
    assert len(connections) == 1


@pytest.mark.full
def test_a_service_whose_processes_do_not_start_says_so_and_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    working = "def score(response, ground_truth):\n    return float(response == ground_truth)\n"
    file.write_text(working)
    with ServiceProcess(reward_type=f"{file}:score") as service:
        file.write_text("raise RuntimeError('no such library')\n")
        for process in service.family()[1:]:
            process.kill()
        status, headers, reply = service.request(
            "POST", "/score", {"responses": ["5"], "problem": {"ground_truth": "5"}}
        )
        assert (status, headers["retry-after"]) == (503, "5")
        assert "no such library" in reply["error"]
        status, _, health = service.request("GET", "/health", token=None)
        assert (status, health["status"]) == (503, "broken")
        monkeypatch.setattr("rewards.remote.client._CHECK_S", 2.0)
        with pytest.raises(ConfigError, match=r"status 503.*broken"):
            check_service(service.url, token=TOKEN)
        file.write_text(working)
        wait_until(lambda: service.health()["status"] == "ok")  # asking for its health makes it try again
        scorer = RemoteScorer(service.url, token=TOKEN)
        assert [score.verdict for score in scorer.submit(["5", "6"], FIVE).result(60)] == ["ok", "wrong"]
        scorer.close()


@pytest.mark.full
def test_programs_are_run_by_the_service_in_its_sandbox_and_none_outlives_it() -> None:
    problem = Problem(ground_truth='{"inputs": ["1 2\\n", "3 4\\n"], "outputs": ["3\\n", "7\\n"]}')
    right = "```python\nprint(sum(map(int, input().split())))\n```"
    with ServiceProcess("--test-timeout-s", "20", reward_type="code") as service:
        check_service(service.url, token=TOKEN, reward_type="code")
        scorer = RemoteScorer(service.url, token=TOKEN, reward_type="code", timeout_s=120.0)
        scores = scorer.submit([right, "```python\nprint(3)\n```", "no program"], problem).result(120)
        assert [(score.verdict, score.reward) for score in scores] == [("ok", 1.0), ("wrong", 0.0), ("wrong", 0.0)]
        scorer.submit(["```python\nwhile True: pass\n```"], problem)
        wait_until(lambda: service.health()["queued"] == 1)
        family = service.family()
        assert len(family) > 2  # the program's processes are among them
        assert service.end() == 0
        wait_until(lambda: all_gone(family), timeout_s=60.0)
        scorer.close()
