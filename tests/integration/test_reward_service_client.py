"""Client and service together: sharing, a full queue, and a service that is killed and comes back."""

import signal
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from coati_rl.errors import ConfigError
from coati_rl.types import Problem
from rewards.remote.client import RemoteScorer, check_service
from tests.integration.reward_service_process import TOKEN, ServiceProcess, all_gone, wait_until

FIVE = Problem(ground_truth="5")
ENDLESS_INTEGRAL = r"\boxed{\int_0^{\infty} \frac{\ln(x+3)}{x^5+2} dx}"  # never ends by itself
GROUP = [r"\boxed{5}", r"\boxed{6}", "no box"]


def test_two_clients_share_a_service_and_none_gets_the_scores_of_the_other() -> None:
    with ServiceProcess() as service:
        clients = [RemoteScorer(service.url, token=TOKEN, reward_type="boxed") for _ in range(2)]
        problems = [Problem(ground_truth=str(number)) for number in range(60)]
        futures = [
            clients[number % 2].submit([rf"\boxed{{{number}}}", r"\boxed{x}", rf"\boxed{{{number + 1}}}"], problem)
            for number, problem in enumerate(problems)
        ]
        verdicts = {tuple(score.verdict for score in future.result(60)) for future in futures}
        for client in clients:
            client.close()
    assert verdicts == {("ok", "wrong", "wrong")}


def test_a_full_queue_makes_the_client_wait_and_succeed() -> None:
    with ServiceProcess("--timeout-s", "1", "--max-queued", "1") as service:
        scorer = RemoteScorer(service.url, token=TOKEN, timeout_s=60.0)
        poison = scorer.submit([ENDLESS_INTEGRAL], FIVE)
        wait_until(lambda: service.health()["queued"] == 1)
        assert service.request("POST", "/score", {"responses": ["x"], "problem": {"ground_truth": "5"}})[0] == 503
        others = [scorer.submit(GROUP, FIVE) for _ in range(3)]
        assert [score.verdict for score in poison.result(60)] == ["invalid"]
        for future in others:
            assert [score.verdict for score in future.result(60)] == ["ok", "wrong", "wrong"]
        scorer.close()


def test_a_service_that_is_killed_makes_groups_invalid_in_time_and_scores_again_when_it_is_back() -> None:
    with ServiceProcess("--timeout-s", "60") as service:
        family = service.family()
        scorer = RemoteScorer(service.url, token=TOKEN, timeout_s=3.0)
        started = time.monotonic()
        lost = [scorer.submit([ENDLESS_INTEGRAL, r"\boxed{5}"], FIVE) for _ in range(3)]
        wait_until(lambda: service.health()["queued"] == 6)
        assert service.end(signal.SIGKILL) == -signal.SIGKILL
        scores = [score for future in lost for score in future.result(10)]
        assert time.monotonic() - started < 6.0
        assert [(score.verdict, score.reward) for score in scores] == [("invalid", 0.0)] * 6
        assert "the reward service: " in scores[0].detail
        wait_until(lambda: not any(process.is_running() for process in family[1:]))
    waiting = RemoteScorer(service.url, token=TOKEN, timeout_s=60.0)
    future = waiting.submit(GROUP, FIVE)  # while it is away
    with ServiceProcess(port=service.port):
        assert [score.verdict for score in future.result(60)] == ["ok", "wrong", "wrong"]
        assert [score.verdict for score in scorer.submit(GROUP, FIVE).result(60)] == ["ok", "wrong", "wrong"]
    scorer.close()
    waiting.close()


def test_a_service_that_ends_lets_requests_in_flight_finish() -> None:
    with ServiceProcess("--timeout-s", "1") as service:
        scorer = RemoteScorer(service.url, token=TOKEN, timeout_s=10.0)
        future = scorer.submit([ENDLESS_INTEGRAL, r"\boxed{5}"], FIVE)
        wait_until(lambda: service.health()["queued"] == 2)
        service.process.send_signal(signal.SIGTERM)
        assert [score.verdict for score in future.result(20)] == ["invalid", "ok"]
        assert service.process.wait(20) == 0
        scorer.close()


def test_a_service_that_is_restarted_loses_no_group() -> None:
    with ServiceProcess("--timeout-s", "60") as service:
        scorer = RemoteScorer(service.url, token=TOKEN, timeout_s=60.0)
        future = scorer.submit([ENDLESS_INTEGRAL, r"\boxed{5}"], FIVE)
        wait_until(lambda: service.health()["queued"] > 0)
        assert service.end() == 0
        assert not future.done()
    with ServiceProcess("--timeout-s", "1", port=service.port):
        scores = future.result(60)
    assert [score.verdict for score in scores] == ["invalid", "ok"]
    assert "the reward service" not in scores[0].detail  # it is the time limit of the second one
    scorer.close()


def test_closing_the_client_does_not_wait_for_the_service() -> None:
    with ServiceProcess("--timeout-s", "60") as service:
        scorer = RemoteScorer(service.url, token=TOKEN)
        scorer.submit([ENDLESS_INTEGRAL], FIVE)
        wait_until(lambda: service.health()["queued"] == 1)
        started = time.monotonic()
        scorer.close()
        assert time.monotonic() - started < 5.0


def test_the_check_accepts_a_service_and_names_a_wrong_token_and_a_wrong_reward_type() -> None:
    with ServiceProcess() as service:
        check_service(service.url, token=TOKEN, reward_type="boxed")
        check_service(service.url, token=TOKEN)
        with pytest.raises(ConfigError, match=r"status 401.*wrong token.*set COATI_REWARD_TOKEN"):
            check_service(service.url, token="wrong", reward_type="boxed")
        with pytest.raises(ConfigError, match=r"the service scores 'boxed', this run needs 'code'"):
            check_service(service.url, token=TOKEN, reward_type="code")


def test_the_check_waits_for_a_service_that_is_being_started() -> None:
    with ServiceProcess() as first:
        port = first.port
    started: list[ServiceProcess] = []
    thread = threading.Thread(target=lambda: started.append(ServiceProcess(port=port)))
    thread.start()
    try:
        asked = time.monotonic()
        check_service(f"http://127.0.0.1:{port}", token=TOKEN, reward_type="boxed")
        assert time.monotonic() - asked > 0.1, "nobody listened yet: the imports alone take longer"
    finally:
        thread.join(60)
        with started[0] as second:
            assert second.port == port


def test_a_connection_is_used_again() -> None:
    with ServiceProcess() as service:
        scorer = RemoteScorer(service.url, token=TOKEN)
        times = [time.monotonic()]
        for _ in range(20):
            scorer.submit([r"\boxed{5}"], FIVE).result(60)
            times.append(time.monotonic())
        connections = service.family()[0].net_connections(kind="tcp")
        scorer.close()
    assert sum(connection.status == "ESTABLISHED" for connection in connections) == 1
    assert min(after - before for before, after in pairwise(times)) < 0.1


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
        monkeypatch.setattr("rewards.remote.client._CHECK_S", 0.5)
        with pytest.raises(ConfigError, match=r"status 503.*broken"):
            check_service(service.url, token=TOKEN)
        file.write_text(working)
        wait_until(lambda: service.health()["status"] == "ok")  # asking for its health makes it try again
        scorer = RemoteScorer(service.url, token=TOKEN)
        assert [score.verdict for score in scorer.submit(["5", "6"], FIVE).result(60)] == ["ok", "wrong"]
        scorer.close()


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
        wait_until(lambda: all_gone(family), timeout_s=10.0)
        scorer.close()
