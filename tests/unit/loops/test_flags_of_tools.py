"""Test that each field of tools changes the run: whole runs in threads whose policy may call tools.

The part of a test's name before two underscores is the field (see test_flags.py).
"""

import sys
from pathlib import Path

import pytest

from coati_rl.errors import ConfigError

HERMES = (
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
)
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}" + HERMES + "{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
FIELDS = {"chat_template": TEMPLATE, "max_prompt_tokens": 700, "max_episode_tokens": 900, "max_steps": 1}
SERVER = f"{sys.executable} -S {Path(__file__).parents[2] / 'integration' / 'mcp_echo_server.py'}"


def test_tools__are_told_of_in_prompts_and_an_answer_without_a_call_is_scored(run_in_threads):
    """The fake engine's answers are random letters, so that none is a call."""
    trace = run_in_threads({**FIELDS, "tools": ["calculator"]})
    for group in trace.groups:
        assert group.prompt.rendered.startswith('{"type": "function", "function": {"name": "calculator", ')
        assert {len(each.turns) for each in group.trajectories} == {1}
        assert {len(each.rewards) for each in group.trajectories} == {0}
        assert {score.verdict for score in group.scores} <= {"ok", "wrong"}
        assert all(record["ended"] == "done" for record in group.records)


def test_mcp_server__offers_its_tools(run_in_threads):
    trace = run_in_threads({**FIELDS, "mcp_server": [f"{SERVER} add"]})
    assert all('{"name": "add", ' in group.prompt.rendered for group in trace.groups)
    assert {record["ended"] for group in trace.groups for record in group.records} == {"done"}


def test_tool_format__is_needed_where_the_template_s_own_is_unknown(run_in_threads):
    unknown = {**FIELDS, "tools": ["calculator"], "chat_template": TEMPLATE.replace(HERMES, "{{ call.function }}")}
    with pytest.raises(ConfigError, match="--tool-format auto: "):
        run_in_threads(unknown)
    trace = run_in_threads({**unknown, "tool_format": "hermes"})
    assert {record["ended"] for group in trace.groups for record in group.records} == {"done"}
