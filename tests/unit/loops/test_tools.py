"""Test a whole run in threads whose policy may call tools."""

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_prompts_tell_of_the_tools_and_an_answer_without_a_call_is_scored(run_in_threads):
    """The fake engine's answers are random letters, so that none is a call."""
    trace = run_in_threads(
        {
            "tools": ["calculator"],
            "chat_template": TEMPLATE,
            "max_prompt_tokens": 700,
            "max_episode_tokens": 900,
            "max_steps": 1,
        }
    )
    for group in trace.groups:
        assert group.prompt.rendered.startswith('{"type": "function", "function": {"name": "calculator", ')
        assert {len(each.turns) for each in group.trajectories} == {1}
        assert {len(each.rewards) for each in group.trajectories} == {0}
        assert {score.verdict for score in group.scores} <= {"ok", "wrong"}
        assert all(record["ended"] == "done" for record in group.records)
