"""Test whole runs in threads whose episodes are agents of their own, asking the policy over HTTP."""

import json
import sys
from pathlib import Path

import pytest

from coati_rl.config.cli import parse
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError
from producer.made_environment import check_environment

AGENT = f"{sys.executable} -S {Path(__file__).parent}/asking_agent.py"


def test_a_run_trains_on_what_agents_ask_and_masks_those_that_fail(run_in_threads):
    trace = run_in_threads(
        {
            "agent_command": AGENT,
            "agent_ground_truth": True,
            "reward_type": "env",
            "chat_template": "chatml",
            "max_episode_tokens": 400,
            "inference_batch_size": 2,
            "max_steps": 1,
            "max_failure_rate": 1.0,
        }
    )
    scores = [(number, score) for group in trace.groups for number, score in enumerate(group.scores)]
    failed = {number for number, score in scores if score.verdict == "invalid"}
    assert failed == {1}, "the second episode of each prompt gives up"
    assert {score.detail for _, score in scores if score.verdict == "invalid"} == {"agent: exit code 1: I give up"}
    for group in trace.groups:
        played = [each for each in group.trajectories if each.episode == 0]
        assert sum(len(each.turns) for each in played) == 2
        assert group.scores[0].reward == sum(reward.value for each in played for reward in each.rewards)
    line, failed_line = map(json.loads, next(trace.paths.rollouts.iterdir()).read_text().split("\n")[:2])
    assert line["environment"]["ended"] == "done" and "stderr" not in line["environment"]
    assert (trace.paths.run_dir / failed_line["environment"]["stderr"]).read_text() == "I give up\n"
    assert [message["role"] for message in line["messages"]] == ["user", "assistant", "user", "assistant"]
    assert [turn["role"] for turn in line["environment"]["turns"]] == ["assistant"] * 2
    assert trace.steps[0]["samples_invalid"] == len(failed) * len(trace.groups) // len(trace.steps)


def refusal(*flags):
    config, _ = parse(["-m", "model", "-d", "data.jsonl", *flags])
    with pytest.raises(ConfigError) as caught:
        check(config)
    return str(caught.value)


def test_settings_without_effect_are_refused(tmp_path):
    assert "--env with --agent-command: the agent is the environment" in refusal(
        "--agent-command", "python x.py", "--env", "e.py:E"
    )
    assert "--max-turns 3 without --env or" in refusal("--agent-command", "python x.py", "--max-turns", "3")


def test_a_program_that_does_not_exist_is_refused():
    config, _ = parse(["-m", "model", "-d", "data.jsonl", "--agent-command", "no-such-program agent.py"])
    with pytest.raises(ConfigError, match="no program no-such-program; give a path"):
        check_environment(config)


def test_an_agents_files_are_found_from_any_directory(tmp_path, monkeypatch):
    (tmp_path / "agent.py").touch()
    monkeypatch.chdir(tmp_path)
    config, _ = parse(["-m", "model", "-d", "data.jsonl", "--agent-command", "python agent.py --name 'a b'"])
    assert config.environment.agent_command == f"python {tmp_path}/agent.py --name 'a b'"
    assert config.reward.reward_type == "env"
    for wrong in ("", "python 'a"):
        with pytest.raises(ConfigError, match="--agent-command"):
            parse(["-m", "model", "-d", "data.jsonl", "--agent-command", wrong])
