"""Test episodes in processes of their own: their state, their end, and what is left of them."""

import os
import random
import signal
import time

import psutil
import pytest

from producer.environments.process_host import ProcessHost
from tests.ended import has_ended

FILE = '''
import os, random, signal, subprocess, time

random.seed(0)  # in the process that others are forked from
BROKEN = {1: "hang", 2: "die", 3: "raise", 4: "much"}
DAEMON = "setsid sh -c 'setsid sleep 3218 & echo'"  # its parent ends at once


class World:
    """Use the state of the whole process; fail as the columns say."""

    def __init__(self, place):
        self.place = place

    async def reset(self, task):
        random.seed(task.episode)
        os.chdir(self.place)
        os.environ["WHO"] = str(task.episode)
        self.mood = BROKEN.get(task.episode) if task.columns.get("is_broken") else None
        return [{"role": "user", "content": "who?"}]

    def step(self, action):
        if self.mood == "hang":
            subprocess.Popen(["sleep", "3217"])
            subprocess.run(DAEMON, shell=True, stdout=subprocess.DEVNULL)
            time.sleep(3217)
        if self.mood == "die":
            subprocess.Popen(["sleep", "3219"], start_new_session=True)
            subprocess.run(DAEMON, shell=True, stdout=subprocess.DEVNULL)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mood == "raise":
            raise OSError("broken")
        if self.mood == "much":
            return "x", 0.0, False, {"x": "y"}, 1, 2
        info = {"random": random.random(), "where": os.getcwd(), "who": os.environ["WHO"], "pid": os.getpid()}
        return "on", 0.5, action.turn == 1, info

    def close(self):
        with open(self.place + "/closed", "a") as file:
            file.write(os.environ["WHO"])
'''


@pytest.fixture
def host(tmp_path):
    (tmp_path / "world.py").write_text(FILE)
    host = ProcessHost(f"{tmp_path}/world.py:World", {"place": str(tmp_path)}, timeout_s=3.0)
    yield host
    host.close()


def running():
    """The descendants of this process."""
    return {each.pid for each in psutil.Process().children(recursive=True) if not has_ended(each)}


@pytest.mark.full
def test_each_episode_has_its_own_global_state_and_none_is_left(play, host, tmp_path):
    before, where = running(), os.getcwd()
    (done,) = play(None, host=host, group_size=3)
    assert done.error is None
    infos = [[turn["info"] for turn in done.records[n]["turns"] if "info" in turn] for n in range(3)]
    for episode, (first, second) in enumerate(infos):
        expected = random.Random(episode)
        assert [first["random"], second["random"]] == [expected.random(), expected.random()]
        assert (first["who"], first["where"]) == (str(episode), str(tmp_path))
    assert len({info["pid"] for both in infos for info in both}) == 3
    assert os.getcwd() == where and "WHO" not in os.environ
    assert sorted((tmp_path / "closed").read_text()) == ["0", "1", "2"]
    assert [done.scores[n].reward for n in range(3)] == [1.0] * 3
    host.close()
    assert running() <= before


def test_an_episode_whose_process_fails_is_invalid_alone_and_what_it_started_ends(play, host, lease_of):
    before = running()
    (done,) = play(None, host=host, leases=[lease_of(group_size=6, columns={"is_broken": True})])
    assert done.error is None
    assert [done.scores[n].verdict for n in range(6)] == ["ok", *["invalid"] * 4, "ok"]
    assert [done.scores[n].detail for n in range(1, 4)] == [
        "environment: step took longer than 3 s (--env-timeout)",
        "environment: its process ended during step",
        "environment: step raised OSError: broken",
    ]
    assert done.scores[4].detail.startswith("environment: step returned ('x', 0.0, False,")
    deadline = time.monotonic() + 60.0
    while len(running() - before) > 1:  # the server alone is left
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (server,) = running() - before
    os.kill(server, signal.SIGKILL)
    (done,) = play(None, host=host)
    assert done.error is None, "the next episodes have a new server"
    host.close()
    assert running() <= before


@pytest.mark.full
def test_a_server_that_has_closed_its_socket_is_replaced_before_it_can_be_waited_for(play, host, monkeypatch):
    (done,) = play(None, host=host)
    assert done.error is None
    monkeypatch.setattr(type(host._server._process), "poll", lambda self: None)
    os.kill(host._server._process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, host._server._process.pid, os.WEXITED | os.WNOWAIT)
    (done,) = play(None, host=host)
    assert done.error is None


@pytest.mark.full
def test_a_file_that_fails_on_import_is_named_as_the_cause(play, tmp_path):
    (tmp_path / "bad.py").write_text("import no_such_module\n")
    host = ProcessHost(f"{tmp_path}/bad.py:World", {}, timeout_s=5.0)
    try:
        (done,) = play(None, host=host)
    finally:
        host.close()
    assert "fails on import: ModuleNotFoundError: No module named 'no_such_module'" in done.error
