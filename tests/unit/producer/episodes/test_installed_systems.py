"""Run agents with base classes of an installed OpenRLHF or RL4LLM, in place of the ones that stand in for them."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest

FILES = Path(__file__).parents[3] / "data" / "other_systems"
SYSTEMS = ("openrlhf", "rl4llm")


def forget():
    for name in [name for name in sys.modules if name.partition(".")[0] in SYSTEMS]:
        del sys.modules[name]


@pytest.fixture(params=["packages", "namespaces"])
def agents(request, tmp_path, monkeypatch):
    """A folder of agents, whose files no test has imported, with the systems on the path."""
    installed = tmp_path / "site"
    shutil.copytree(FILES / "installed", installed)
    if request.param == "packages":
        for folder in (*installed.glob("*"), *installed.glob("*/*/")):
            (folder / "__init__.py").touch()
    shutil.copytree(FILES, tmp_path / "files", ignore=shutil.ignore_patterns("installed"))
    forget()
    monkeypatch.syspath_prepend(str(installed))
    yield tmp_path / "files"
    forget()


def test_the_installed_loop_of_openrlhf_plays_the_steps_and_is_recorded(play_file, agents):
    path = agents / "openrlhf_agents" / "steps_with_bonus.py"
    path.write_text(path.read_text().replace("async def __init__", "def __init__"))  # which their own loop cannot call
    done = play_file(path, lambda context: "hm")
    assert (done.scores[0].reward, done.scores[0].filter_score, done.records[0]["metrics"]) == (2.25, 0.5, {"turns": 2})
    played = importlib.import_module("openrlhf.utils.agent").PLAYED
    assert played == [(0, "hm", "stop")] * 4  # two turns of two episodes


def test_an_executor_without_a_method_of_its_own_is_played_by_steps(play_file, agents):
    path = agents / "openrlhf_agents" / "steps.py"
    text = path.read_text().replace("openrlhf.utils.logging_utils import init_logger", "logging import getLogger")
    path.write_text(text.replace("init_logger(", "getLogger("))
    done = play_file(path, lambda context: "hm")
    assert (done.scores[0].reward, done.scores[0].filter_score) == (3.0, 0.75)


@pytest.mark.sampled(2)
def test_the_installed_environment_of_rl4llm_checks_what_it_is_given_and_makes_the_reward(play_file, agents):
    done = play_file(agents / "rl4llm_files" / "two_rewards.py", lambda context: "4")
    assert done.scores[0].reward == pytest.approx(0.85)
    assert done.records[0]["metrics"] == {"accuracy_reward": 1.0, "length_reward": 0.5}
    made = importlib.import_module("rl4llm.core.base_env").MADE
    assert made == [(1, 1, "4")] * 2
