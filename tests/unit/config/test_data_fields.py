"""Test where -d says that rows come from, and how the settings of columns and templates are checked."""

from fractions import Fraction

import pytest

from coati_rl.config.cli import build_config, parse
from coati_rl.config.named_paths import DataSource, read_sources
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError

TENTHS = (Fraction(3, 10), Fraction(7, 10))


def data_of(*argv):
    return parse(argv)[0].data


def refusal(*argv):
    with pytest.raises(ConfigError) as caught:
        check(parse(argv)[0])
    return str(caught.value)


@pytest.mark.parametrize(
    ("flags", "sources", "shares"),
    [
        (["a.jsonl"], {"": ["a.jsonl"]}, ()),
        (["a.jsonl,b.csv"], {"": ["a.jsonl", "b.csv"]}, ()),
        (["a.jsonl=0.3,b.jsonl=0.7"], {"": ["a.jsonl", "b.jsonl"]}, TENTHS),
        (["a.jsonl=3,b.jsonl=7."], {"": ["a.jsonl", "b.jsonl"]}, TENTHS),
        (["a.jsonl=.5"], {"": ["a.jsonl"]}, (Fraction(1),)),
        (["rows/,acme/sums:main:test"], {"": ["rows/", "acme/sums:main:test"]}, ()),
        (["math=a.jsonl", "code=b.jsonl"], {"math": ["a.jsonl"], "code": ["b.jsonl"]}, ()),
        (["math=a.jsonl=0.3", "code=b.jsonl=0.7"], {"math": ["a.jsonl"], "code": ["b.jsonl"]}, TENTHS),
        (["math=a.jsonl=1,b.jsonl=2", "code=c.jsonl=1"], {"math": ["a.jsonl", "b.jsonl"], "code": ["c.jsonl"]},
         (Fraction(1, 4), Fraction(1, 2), Fraction(1, 4))),
        (['{"math": "a.jsonl=0.3", "code": "b.jsonl=0.7"}'], {"math": ["a.jsonl"], "code": ["b.jsonl"]}, TENTHS),
    ],
)  # fmt: skip
def test_files_may_have_tasks_and_shares(flags, sources, shares):
    data = data_of(*(word for flag in flags for word in ("-d", flag)))
    assert {task: [source.path for source in each] for task, each in data.sources.items()} == sources
    assert data.shares == shares


def test_a_path_that_exists_is_a_path_whatever_it_looks_like(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a=0.5", "b,c.jsonl"):
        (tmp_path / name).touch()
        assert read_sources(name) == (DataSource(path=name),)
    assert read_sources("a=0.5,d=0.5") == (DataSource(path="a=0.5"), DataSource(path="d", share=Fraction(1, 2)))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-d", "a=0.5,b"], "--dataset 'a=0.5,b': b has no share, and others have; give each a share"),
        (["-d", "x=a=0.5", "-d", "y=b"], "b has no share"),
        (["-d", "x=a=0.5", "-d", "y=a"], "a has no share"),
        (["-d", "x=a", "-d", "y=a=0.5"], "a has no share"),
        (["-d", "a=0,b=1"], "--dataset 'a=0,b=1': the share of a is 0; leave it out"),
        (["-ed", "x=a=0.5,b"], "an evaluation set is read whole: leave out the share of a"),
        (["-d", "a,,b"], "a path is empty; write PATH,PATH or PATH=SHARE"),
        (["--input-template", "Q:"], "--input-template 'Q:': has no {}, in place of which the prompt's"),
        (["--chat-template", "none.jinja"], "--chat-template 'none.jinja': is neither a file, nor a template"),
        (["--max-samples", "0"], "--max-samples '0': Input should be greater than or equal to 1"),
        (["--input-template", "{}", "--chat-template", "chatml"], "--input-template with --chat-template"),
        (["--input-template", "{}", "-s", "Be brief."], "--input-template with --system-prompt: write what it says"),
        (["--input-template", "{}", "--tasks", '{"a": {"system_prompt": "x"}}'], "--tasks a: --input-template with"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named_with_the_remedy(argv, message):
    assert message in refusal(*argv)


def test_other_systems_names_of_columns_are_flags_too():
    data = data_of("--input-key", "question", "--label_key", "answer")
    assert (data.prompt_key, data.answer_key) == ("question", "answer")


def test_a_template_in_a_file_is_read_and_a_run_goes_on_with_its_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    (tmp_path / "notes.txt").write_text("no template")
    assert data_of("--chat-template", "chat.jinja").chat_template == "{{ messages }}"
    assert data_of("--chat-template", "{{ messages }}").chat_template == "{{ messages }}"
    assert "'notes.txt': holds no Jinja template" in refusal("--chat-template", "notes.txt")
    assert build_config({"chat_template": "chatml", "system_prompt": ""}).data.chat_template == "chatml"
