"""Test that a run's chat templates write one date: in all its processes, and when it is resumed on another day."""

import copy
import json
import shutil
from datetime import datetime as real_datetime
from pathlib import Path

import cloudpickle
import pytest
import torch
import yaml
from transformers.utils import chat_template_utils

from coati_rl.batching.dataset_source import DatasetSource
from coati_rl.checkpoint.directory import load_state
from coati_rl.checkpoint.position import Position, data_state
from coati_rl.config.cli import parse, parse_job
from coati_rl.config.commands import OFFLINE
from coati_rl.config.generate import GenerateConfig
from coati_rl.config.generate_rules import check_generate
from coati_rl.config.offline_rules import check_offline
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError
from coati_rl.preflight.prepare import RunPreparation
from coati_rl.preflight.prepare_generation import prepare_generation
from coati_rl.preflight.prepare_offline import DatasetPreparation, dataset_settings
from coati_rl.preflight.prompts import RewardFacts
from coati_rl.reading import chat_template
from coati_rl.reading.chat_template import set_variables
from consumer.backend import Backend
from consumer.parallel.layout_rules import check_layout
from consumer.parallel.single_process import SingleProcess
from producer.environments.chat import ChatTemplate
from producer.environments.compatible.run_limits import RunLimits
from producer.made_environment import make_environment
from tests.backends import backend_config

# As Llama 3.2's template begins, and as Granite's.
DATED = (
    "{%- if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}26 Jul 2024{% endif %}{{ '\n' }}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "answer"}]
FACTS = RewardFacts(default_system_prompt=lambda _: "", needs_ground_truth=lambda _: False)
FLAGS = "-t 1 -i 1 -ibs 2 -imbs 1 -tbs 2 -tMbs 1 -tmbs 1 -g 2 -mpt 128 -mnt 64 --device cpu"


@pytest.fixture
def day(monkeypatch):
    """day(number): let it be that day of January 2026, for this project and for transformers."""

    def of(number):
        class Clock(real_datetime):
            @classmethod
            def now(cls, tz=None):
                return cls(2026, 1, number, 9, 30, 7)

        monkeypatch.setattr(chat_template, "datetime", Clock)
        monkeypatch.setattr(chat_template_utils, "datetime", Clock)

    of(1)
    return of


@pytest.fixture
def dated(model_dir, tmp_path):
    """A model whose template writes today's date, and 4 rows that serve as conversations and as prompts."""
    directory = tmp_path / "dated"
    shutil.copytree(model_dir, directory)
    (directory / "chat_template.jinja").write_text(DATED)
    rows = [{"messages": TURNS[:1], "prompt": "q", "gt_answer": "1"}] * 4
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps({'messages': TURNS})}\n" * 4)
    return directory


@pytest.fixture
def sft(dated, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*flags, model=dated):
        argv = ["-m", str(model), "-d", str(tmp_path / "rows.jsonl"), "-tbs", "2", *map(str, flags)]
        config = parse_job(argv, OFFLINE["sft"])[0]
        check_offline(config)
        return DatasetPreparation(check_layout=check_layout, try_model=lambda *_, **__: 0.0, is_dry_run=False).prepare(
            config
        )

    return run


@pytest.fixture
def rl(dated, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*flags):
        argv = ["-m", str(dated), "-d", str(tmp_path / "prompts.jsonl"), *FLAGS.split(), *map(str, flags)]
        config = parse(argv)[0]
        check(config)
        return RunPreparation(
            rewards=FACTS, check_layout=check_layout, try_model=lambda *_, **__: 0.0, is_dry_run=False
        ).prepare(config)

    return run


def save(job, data, directory, *, has_date=True):
    """Write a checkpoint of step 1 as a trainer does."""
    config = job.config
    backend = Backend(
        backend_config(Path(config.model.model), template_date=config.data.template_date if has_date else None),
        SingleProcess(device=torch.device("cpu")),
    )
    backend.save(directory / "step-1", state={"step": 1, "policy_version": 1, "data": data})
    return directory / "step-1"


def of_dataset(job):
    """The position of a job on a dataset after step 1."""
    source = DatasetSource(job.train, dataset_settings(job.config, job.mixing))
    return {**source.data_state(1), "job": "sft", "last_evaluated": -1, "time_s": 1.0}


def test_a_fixed_date_is_written_whoever_applies_the_template(tokenizer, day):
    dated = copy.deepcopy(tokenizer)
    dated.chat_template = DATED
    set_variables(dated, date="2024-07-04", variables={})
    for each in (dated, copy.deepcopy(dated), cloudpickle.loads(cloudpickle.dumps(dated))):
        assert each.apply_chat_template(TURNS, tokenize=False).startswith("04 Jul 2024\n")
        assert ChatTemplate(each).render(TURNS).startswith("04 Jul 2024\n")
    assert each.apply_chat_template([TURNS], tokenize=False, strftime_now=lambda _: "own")[0].startswith("own\n")
    set_variables(dated, date=None, variables={})
    assert dated.apply_chat_template(TURNS, tokenize=False).startswith("01 Jan 2026\n")


def test_the_date_is_kept_only_of_templates_that_write_one(sft, model_dir, day):
    assert sft().config.data.template_date == "2026-01-01T09:30:07"
    assert sft("--template-date", "2024-07-04").config.data.template_date == "2024-07-04T00:00:00"
    assert sft(model=model_dir).config.data.template_date is None


def test_a_text_that_is_no_date_is_refused(sft):
    with pytest.raises(ConfigError, match=r"--template-date.*is no date; write it as 2026-01-31"):
        sft("--template-date", "tomorrow")


def test_a_job_on_a_dataset_is_resumed_the_next_day_on_the_same_tokens(sft, day, tmp_path):
    first = sft()
    checkpoint = save(first, of_dataset(first), tmp_path / "elsewhere")  # as with --save-dir: without a config.yaml
    assert load_state(checkpoint)["template_date"] == "2026-01-01T09:30:07"
    day(2)
    assert sft().train[0].token_ids.tolist() != first.train[0].token_ids.tolist()
    resumed = sft("-cp", checkpoint)
    assert resumed.resume.step == 1 and resumed.config.data.template_date == "2026-01-01T09:30:07"
    assert [each.token_ids.tolist() for each in resumed.train] == [each.token_ids.tolist() for each in first.train]


def test_a_run_with_producers_is_resumed_the_next_day_on_the_same_prompts(rl, day, tmp_path):
    first = rl()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(first.config.flat("json")))
    position = data_state(Position(step=1, num_drawn=2), first.source.order)
    checkpoint = save(first, position, tmp_path / "run/checkpoints")
    day(2)
    assert rl().train.prompts[0].token_ids != first.train.prompts[0].token_ids
    resumed = rl("-cp", checkpoint)
    assert resumed.resume.step == 1 and resumed.resume.changes == ()
    assert [each.token_ids for each in resumed.train.prompts] == [each.token_ids for each in first.train.prompts]


def test_without_the_date_of_its_start_a_run_is_not_resumed_and_the_flag_is_named(sft, rl, day, tmp_path):
    first = sft()
    checkpoint = save(first, of_dataset(first), tmp_path / "old", has_date=False)  # as earlier versions wrote it
    day(2)
    with pytest.raises(
        ConfigError, match=r"the chat template writes the date, here 2026-01-02T09:30:07; --template-date"
    ):
        sft("-cp", checkpoint)
    assert sft("-cp", checkpoint, "--template-date", "2026-01-01").resume.step == 1
    day(1)
    run = rl()
    checkpoint = save(run, data_state(Position(step=1, num_drawn=2), run.source.order), tmp_path / "rl", has_date=False)
    day(2)
    with pytest.raises(ConfigError, match=r"writes the date, here 2026-01-02T09:30:07; --template-date"):
        rl("-cp", checkpoint)


def test_producers_and_their_agents_write_the_date_of_the_run(rl, day):
    config = rl().config
    day(2)
    limits = RunLimits(
        model=str(config.model.model),
        chat_template=None,
        max_turns=1,
        max_tokens=9,
        template_date=config.data.template_date,
    )
    assert limits.tokenizer().apply_chat_template(TURNS, tokenize=False).startswith("01 Jan 2026\n")
    of_tools = make_environment(config.with_changes(tools=("python",), tool_format="hermes"))
    of_agents = make_environment(config.with_changes(agent_command="true"))
    try:
        for template in (of_tools._template, of_agents._language.template):
            assert template.render(TURNS[:1]).startswith("01 Jan 2026\n")
    finally:
        of_tools.close()
        of_agents.close()


def test_rows_of_a_file_that_was_begun_the_day_before_have_its_date(dated, day, tmp_path):
    argv = [
        "-m",
        str(dated),
        "-d",
        str(tmp_path / "prompts.jsonl"),
        "-o",
        str(tmp_path / "out.jsonl"),
        "--device",
        "cpu",
    ]
    config = parse_job([*argv, "-mpt", "128", "-mnt", "64"], GenerateConfig)[0]
    check_generate(config)
    first = prepare_generation(config, rewards=FACTS)
    day(2)
    again = prepare_generation(config, rewards=FACTS, earlier=json.loads(json.dumps(first.settings)))
    assert again.settings == first.settings
    assert prepare_generation(config, rewards=FACTS).settings != first.settings
