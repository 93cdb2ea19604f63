"""Test that --chat-template-kwargs reaches every conversation that a job renders, and that a row's own column wins."""

import copy
import json
import shutil

import cloudpickle
import pytest
import torch
import yaml

from coati_rl.checkpoint.resumed_run import changed_settings
from coati_rl.config.cli import parse, parse_job
from coati_rl.config.commands import ALL, OFFLINE
from coati_rl.config.generate_rules import check_generate
from coati_rl.config.offline_rules import check_offline
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError
from coati_rl.preflight.prepare import RunPreparation
from coati_rl.preflight.prepare_generation import prepare_generation
from coati_rl.preflight.prepare_offline import DatasetPreparation
from coati_rl.preflight.prompts import RewardFacts
from coati_rl.reading.chat_template import set_variables
from consumer.parallel.layout_rules import check_layout
from producer.environments.chat import ChatTemplate
from producer.environments.compatible.run_limits import RunLimits
from producer.made_environment import make_environment

MOODY = (
    "{{ mood | default('-') }} {% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ASKED = [{"role": "user", "content": "q"}]
TURNS = [*ASKED, {"role": "assistant", "content": "answer"}]
CALM = ["--chat-template-kwargs", '{"mood": "calm"}']
FACTS = RewardFacts(default_system_prompt=lambda _: "", needs_ground_truth=lambda _: False)
FLAGS = "-t 1 -i 1 -ibs 2 -imbs 1 -tbs 2 -tMbs 1 -tmbs 1 -g 2 -mpt 128 -mnt 64 --device cpu"
MAKE = {"check_layout": check_layout, "try_model": lambda *_, **__: 0.0, "is_dry_run": False}
PAIR = {"prompt": ASKED, "chosen": "Yo", "rejected": "No"}
PROMPT = {"messages": ASKED, "gt_answer": "1"}


@pytest.fixture
def moody(model_dir, tmp_path):
    directory = tmp_path / "moody"
    shutil.copytree(model_dir, directory)
    (directory / "chat_template.jinja").write_text(MOODY)
    return directory


@pytest.fixture
def job(moody, tmp_path, monkeypatch):
    """job(command, row, flags, own=...) -> what is prepared of 4 rows, of which two may have a column of their own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def make(command, row, *flags, own=None):
        other = json.loads(json.dumps(row).replace('"q"', '"p"'))  # KTO needs two prompts
        rows = [row, other if own is None else {**other, "chat_template_kwargs": own}] * 2
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
        argv = ["-m", str(moody), "-d", str(path), *flags]
        if command in OFFLINE:
            config = parse_job([*argv, "-tbs", "2"], OFFLINE[command])[0]
            check_offline(config)
            return DatasetPreparation(**MAKE).prepare(config)
        if command == "generate":
            argv += ["-o", str(tmp_path / "out.jsonl"), "--device", "cpu", "-mpt", "128", "-mnt", "64"]
            config = parse_job(argv, ALL[command])[0]
            check_generate(config)
            return prepare_generation(config, rewards=FACTS)
        config = parse([*argv, *FLAGS.split()])[0]
        check(config)
        return RunPreparation(rewards=FACTS, **MAKE).prepare(config)

    return make


def first_words(prompts):
    return [prompt.rendered.split()[0] for prompt in prompts.prompts]


def test_variables_are_set_whoever_applies_the_template_and_may_be_set_otherwise(tokenizer):
    moody = copy.deepcopy(tokenizer)
    moody.chat_template = MOODY.replace(" {% for", " {{ strftime_now('%d%b') }} {% for")
    set_variables(moody, date="2024-07-04", variables={"mood": "calm"})
    for each in (moody, copy.deepcopy(moody), cloudpickle.loads(cloudpickle.dumps(moody))):
        assert each.apply_chat_template(TURNS, tokenize=False).startswith("calm 04Jul ")
        assert ChatTemplate(each).render(TURNS).startswith("calm 04Jul ")
    assert moody.apply_chat_template(TURNS, tokenize=False, mood="mad").startswith("mad 04Jul ")
    set_variables(moody, date="2024-07-04", variables={})
    assert moody.apply_chat_template(TURNS, tokenize=False).startswith("- 04Jul ")


def test_prompts_and_evaluations_of_a_run_have_them_and_a_rows_own_win(job, tmp_path):
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps(PROMPT) + "\n")
    made = job("rl", PROMPT, *CALM, "-ed", f"held={held_out}", own={"mood": "mad"})
    assert first_words(made.train) == ["calm", "mad"] * 2
    assert first_words(made.evaluation["held"]) == ["calm"]
    assert first_words(job("rl", PROMPT).train) == ["-"] * 4


def test_batch_inference_has_them_and_goes_on_with_the_same_alone(job):
    made = job("generate", PROMPT, *CALM, own={"mood": "mad"})
    assert first_words(made.prompts) == ["calm", "mad"] * 2
    assert made.settings["chat_template_kwargs"] == {"mood": "calm"}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("command", "row", "flags"),
    [
        ("sft", {"messages": TURNS}, []),
        ("dpo", PAIR, []),
        ("rm", PAIR, []),
        ("kto", {"prompt": ASKED, "completion": "Yo", "label": True}, []),
        (
            "prm",
            {"prompt": ASKED, "completions": ["Yo"], "labels": [1]},
            "--placeholder-token | --reward-tokens Y --reward-tokens o",
        ),
    ],
)
def test_jobs_on_a_dataset_have_them_and_a_rows_own_win(job, tokenizer, command, row, flags):
    flags = flags.split() if flags else []
    made = job(command, row, *CALM, *flags, own={"mood": "mad"})
    texts = [tokenizer.decode([*sample.prefix_ids, *sample.token_ids]) for sample in made.train]
    assert {text.split()[0] for text in texts} == {"calm", "mad"}
    assert not any("chat-template-kwargs" in each for each in made.warnings)


def test_environments_agents_and_their_tokenizers_have_them(job):
    config = job("rl", PROMPT, *CALM).config
    data = config.data
    limits = RunLimits(
        model=str(config.model.model),
        chat_template=None,
        max_turns=1,
        max_tokens=9,
        chat_template_kwargs=data.chat_template_kwargs,
    )
    assert limits.tokenizer().apply_chat_template(TURNS, tokenize=False).startswith("calm ")
    of_tools = make_environment(config.with_changes(tools=("python",), tool_format="hermes"))
    of_agents = make_environment(config.with_changes(agent_command="true"))
    try:
        for template in (of_tools._template, of_agents._language.template):
            assert template.render(TURNS[:1]).startswith("calm ")
    finally:
        of_tools.close()
        of_agents.close()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["tokenize", "tools", "chat_template", "messages", "strftime_now"])
def test_a_variable_that_is_not_the_templates_to_read_is_refused_as_in_a_row(job, name):
    cause = f"chat_template_kwargs sets {name}, which is not the template's to read; leave it out"
    with pytest.raises(ConfigError) as raised:
        job("rl", PROMPT, "--chat-template-kwargs", json.dumps({name: 1}))
    assert str(raised.value) == f"--chat-template-kwargs: {cause}"
    with pytest.raises(ConfigError, match=f"train, prompt 2: {cause}"):
        job("rl", PROMPT, *CALM, own={name: 1})


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("{bad", "--chat-template-kwargs '{bad': not JSON"),
        ("[1]", "--chat-template-kwargs"),
        ('{"mood": "\\ud83d"}', r"--chat-template-kwargs: chat_template_kwargs holds \ud83d, half of a surrogate pair"),
    ],
)
def test_what_is_no_object_of_variables_is_refused(job, text, cause):
    with pytest.raises(ConfigError) as raised:
        job("rl", PROMPT, "--chat-template-kwargs", text)
    assert str(raised.value).startswith(cause)


@pytest.mark.parametrize("command", ["rl", "generate"])
def test_text_without_a_chat_template_has_no_variables(job, command):
    with pytest.raises(ConfigError, match="--input-template with --chat-template-kwargs: no chat template reads them"):
        job(command, PROMPT, *CALM, "--input-template", "{}")


def test_a_variable_that_nothing_reads_is_warned_about(job):
    flags = ["--chat-template-kwargs", '{"mood": "calm", "moo": 1}']
    told = "--chat-template-kwargs: moo has no effect, as the model's chat template does not read it"
    for command, row in (("rl", PROMPT), ("generate", PROMPT), ("sft", {"messages": TURNS})):
        assert [each for each in job(command, row, *flags).warnings if "has no effect" in each] == [told]
    told = "--chat-template-kwargs: mood has no effect, as rows are plain text"
    assert told in job("sft", {"text": "A document."}, *CALM).warnings


def test_they_are_part_of_the_experiment(job, tmp_path):
    before, now = (job("rl", PROMPT, *flags).config for flags in (CALM, []))
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(before.flat("json")))
    again = parse(["--config", str(path)])[0]
    assert again.data.chat_template_kwargs == {"mood": "calm"}
    assert parse(["--config", str(path), "--chat-template-kwargs", "None"])[0].data.chat_template_kwargs == {}
    (change,) = changed_settings(before, now, sizes=())
    assert change == "chat_template_kwargs was {'mood': 'calm'} and is {} now"
