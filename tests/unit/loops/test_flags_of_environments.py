"""Test that each field of environments of several turns changes the run: two whole runs in threads that differ in it.

The part of a test's name before two underscores is the field (see test_flags.py).
"""

import os
import sys
from pathlib import Path

import pytest

from coati_rl.config.cli import build_config
from coati_rl.errors import ConfigError
from producer.gateway import made_agents

TALK = f"{Path(__file__).parent}/talk.py:Talk"
ONE_STEP = {"max_steps": 1, "inference_batch_size": 2}
CHAT = {"chat_template": "chatml", "max_episode_tokens": 400, "reward_type": "boxed", **ONE_STEP}
TALKING = {**CHAT, "env": TALK, "reward_type": "env"}
HERMES = (
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
)
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}" + HERMES + "{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TOOLED = {"chat_template": TOOL_TEMPLATE, "max_prompt_tokens": 700, "max_episode_tokens": 900, **ONE_STEP}
SERVER = f"{sys.executable} -S {Path(__file__).parents[2] / 'integration' / 'mcp_echo_server.py'}"


@pytest.fixture(scope="module")
def trace_of(run_in_threads):
    """Changes to the run of TALKING -> its trace, made once."""
    traces = {}

    def run(**changes):
        key = repr(sorted(changes.items()))
        if key not in traces:
            traces[key] = run_in_threads({**TALKING, **changes})
        return traces[key]

    return run


def num_turns(trace):
    return {len(trajectory.turns) for group in trace.groups for trajectory in group.trajectories}


def is_here(trace):
    """Whether this process ran the code of the episodes."""
    turns = [turn for group in trace.groups for record in group.records for turn in record["turns"]]
    return {turn["info"]["pid"] == os.getpid() for turn in turns if "info" in turn}


def test_env__answers_the_policy(trace_of, run_in_threads):
    assert (num_turns(run_in_threads(CHAT)), num_turns(trace_of())) == ({1}, {2})


def test_env_arg__is_given_to_the_class(trace_of):
    assert num_turns(trace_of(env_arg=["turns=3"])) == {3}


def test_max_turns__ends_an_episode(trace_of):
    trace = trace_of(max_turns=1)
    assert num_turns(trace) == {1}
    assert {trajectory.finish_reason for group in trace.groups for trajectory in group.trajectories} == {"length"}


def test_env_isolation__runs_each_episode_in_a_process(trace_of):
    assert (is_here(trace_of()), is_here(trace_of(env_isolation="process"))) == ({True}, {False})


def test_env_timeout__makes_an_episode_that_takes_longer_invalid(trace_of):
    slow = {"env_arg": ["wait_s=0.5"], "max_failure_rate": 1.0}
    invalid = [trace_of(**slow, env_timeout=limit_s).steps[0]["samples_invalid"] for limit_s in (60.0, 0.1)]
    assert invalid == [0, 2]


def test_stale_episodes__cuts_an_episode_that_trainers_wait_for_and_no_other(run_in_threads):
    """By default they wait: see test_episodes.py."""
    slow = {"env_arg": ["wait_s=40", "waits_in=train-0.0"], "max_failure_rate": 0.3}
    slow |= {"max_steps": None, "inference_batch_size": 4, "num_episodes": 2}
    trace = run_in_threads({**TALKING, **slow, "n_behind": 1, "inflight_update": True, "stale_episodes": "cut"})
    (group,) = [group for group in trace.groups if group.prompt.uid == "train-0.0"]
    assert [score.verdict for score in group.scores] == ["ok", "invalid"]
    assert "--stale-episodes cut" in group.scores[1].detail
    assert {step["staleness_max"] for step in trace.steps} <= {0, 1}
    assert sum(step["samples_invalid"] for step in trace.steps) == 1
    assert (len(trace.steps), len(trace.groups)) == (8, 16)


def test_turn_advantages__gives_each_turn_an_advantage_of_its_own(trace_of):
    """The rewards of a turn are in no earlier one's return with a discount of 0; see test_turn_advantages.py."""
    by_episode, by_turn = (trace_of(**changes).gradients[0] for changes in ({}, {"turn_advantages": 0.0}))
    assert any((gradient != by_turn[name]).any() for name, gradient in by_episode.items())


def test_tools__are_told_of_in_prompts_and_an_answer_without_a_call_is_scored(run_in_threads):
    """The fake engine's answers are random letters, so that none is a call."""
    trace = run_in_threads({**TOOLED, "tools": ["calculator"]})
    for group in trace.groups:
        assert group.prompt.rendered.startswith('{"type": "function", "function": {"name": "calculator", ')
        assert {len(each.turns) for each in group.trajectories} == {1}
        assert {len(each.rewards) for each in group.trajectories} == {0}
        assert {score.verdict for score in group.scores} <= {"ok", "wrong"}
        assert all(record["ended"] == "done" for record in group.records)


@pytest.mark.full
def test_mcp_server__offers_its_tools(run_in_threads):
    trace = run_in_threads({**TOOLED, "mcp_server": [f"{SERVER} add"]})
    assert all('{"name": "add", ' in group.prompt.rendered for group in trace.groups)
    assert {record["ended"] for group in trace.groups for record in group.records} == {"done"}


def test_tool_format__is_needed_where_the_template_s_own_is_unknown(run_in_threads):
    unknown = {**TOOLED, "tools": ["calculator"], "chat_template": TOOL_TEMPLATE.replace(HERMES, "{{ call.function }}")}
    with pytest.raises(ConfigError, match="--tool-format auto: "):
        run_in_threads(unknown)
    trace = run_in_threads({**unknown, "tool_format": "hermes"})
    assert {record["ended"] for group in trace.groups for record in group.records} == {"done"}


@pytest.fixture
def agent_of(monkeypatch, model_dir):
    """Flags -> what a producer is told of agents; a whole run with agents is in test_agents.py."""
    monkeypatch.setattr(made_agents, "AgentEnvironment", lambda agent, *_, **__: agent)

    def make(**changes):
        given = {"model": str(model_dir), "dataset": "d", "chat_template": "chatml", "agent_command": "python -V"}
        return made_agents.make_agents(build_config({**given, **changes}))

    return make


def test_agent_command__is_what_is_started(agent_of):
    assert agent_of().command == ("python", "-V")


def test_agent_timeout__is_the_time_of_an_episode(agent_of):
    assert [agent_of(**given).timeout_s for given in ({}, {"agent_timeout": 7.0})] == [600.0, 7.0]


def test_agent_processes__is_how_many_run_at_a_time(agent_of):
    assert [agent_of(**given).max_processes for given in ({}, {"agent_processes": 3})] == [64, 3]


def test_agent_ground_truth__is_told(agent_of):
    assert [agent_of(**given).with_ground_truth for given in ({}, {"agent_ground_truth": True})] == [False, True]
