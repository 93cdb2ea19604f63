"""Test the settings of tools: what is refused, what the plan says, and that prompts tell of the tools."""

import copy

import pytest

from coati_rl.config.cli import parse
from coati_rl.config.plan import make_plan
from coati_rl.config.reward_rules import reward_warnings
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError
from coati_rl.reading.dataset import make_prompts
from coati_rl.reading.tasks import Task, TaskRow
from producer.made_environment import check_environment

HERMES = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def config_of(*words):
    return parse(words)[0]


def refusal(*words):
    with pytest.raises(ConfigError) as caught:
        config = config_of(*words)
        check(config)
        check_environment(config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--tools calculator -rt env", "--reward-type env: there is no environment to give rewards"),
        ("--tools calculator --env w.py:W", "--tools calculator with --env: an environment of your own calls tools"),
        ("--tools abacus", "abacus is no tool; use calculator, python or FILE.py:FUNCTION"),
        ("--tools calculator,calculator", "calculator is given twice; give it once"),
        ("--tools calculator --input-template {}", "--input-template with --tools calculator: its turns are messages"),
        ("--tool-format xml --tools calculator", "--tool-format 'xml': Input should be 'auto', 'hermes'"),
        ("--tools /nowhere.py:f", "--tools /nowhere.py:f: there is no file /nowhere.py"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_remedy(text, message):
    assert message in refusal(*text.split())


def test_a_command_of_a_server_is_one_that_a_shell_would_take():
    assert "is no command" in refusal("--mcp-server", "")
    assert "No closing quotation" in refusal("--mcp-server", "python 'server.py")
    assert config_of("--mcp-server", "python 'my server.py' -v").environment.mcp_server == ["python 'my server.py' -v"]


def test_names_are_separated_by_commas_or_flags_and_paths_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = config_of("--tools", "calculator, own.py:f", "--tools", "python")
    assert config.environment.tools == ["calculator", f"{tmp_path}/own.py:f", "python"]


def test_tools_are_an_environment_whose_reward_is_that_of_the_last_answer():
    config = config_of("--tools", "calculator", "--tools", "python", "--mcp-server", "serve -x", "-mpt", "100")
    assert config.environment.is_given
    assert config.reward.reward_type == "think_answer_tags"
    (line,) = [line for line in make_plan(config, num_prompts=64, device="cpu").lines() if "environment" in line]
    assert "tools calculator, python, serve -x (format auto; at most 16 turns, " in line


def test_code_of_the_policy_without_the_sandbox_is_warned_about():
    config = config_of("--tools", "python", "--run-model-code-without-sandbox", "-rt", "boxed")
    (warning,) = [each for each in reward_warnings(config) if "sandbox" in each]
    assert "programs that the model writes run with your rights" in warning


def test_prompts_tell_of_the_tools(tokenizer):
    facts = check_environment(config_of("--tools", "calculator"))
    own = copy.deepcopy(tokenizer)
    own.chat_template = HERMES
    facts.check_tokenizer(own)
    row = TaskRow(task=Task(truth=None, tools=facts.tools), fields={"messages": {"role": "user", "content": "1 + 1?"}})
    (prompt,) = make_prompts([row], own, max_prompt_tokens=2000).prompts
    assert prompt.rendered.startswith('{"type": "function", "function": {"name": "calculator", ')
    assert own.decode(list(prompt.token_ids)) == prompt.rendered


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (HERMES.replace("{{ tool | tojson }}", ""), "--tools: the model's chat template leaves out the tool 'calc"),
        (
            HERMES.replace("m.tool_calls or []", "[]"),
            "--tool-format auto: the model's chat template writes",
        ),
        (
            HERMES.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"),
            "--tools: the model's chat template leaves out a message of the role 'tool'",
        ),
    ],
)
def test_a_template_that_does_not_write_tools_or_results_is_refused(tokenizer, template, message):
    facts = check_environment(config_of("--tools", "calculator"))
    own = copy.deepcopy(tokenizer)
    own.chat_template = template
    with pytest.raises(ConfigError) as caught:
        facts.check_tokenizer(own)
    assert message in str(caught.value)
