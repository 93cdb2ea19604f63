"""Test --help: the flags in groups, and one group alone."""

import re

import pytest

from coati_rl.config import Config
from coati_rl.config.cli import build_parser, parse
from coati_rl.errors import ConfigError


def printed(capsys, *argv):
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 0
    return capsys.readouterr().out


def flags_in(text):
    """Flags that are explained, in order: the first of each."""
    return re.findall(r"^  (-[\w-]+)", text, flags=re.MULTILINE)


def test_model_and_data_come_first_and_the_groups_are_the_sections_in_order(capsys):
    text = printed(capsys, "--help")
    titles = re.findall(r"^(\S.*):$", text, flags=re.MULTILINE)
    sections = [
        "sampling",
        "environment",
        "reward",
        "algorithm",
        "control",
        "critic",
        "distillation",
        "lora",
        "optimizer",
        "parallel",
    ]
    sections += ["cluster", "sync", "run"]
    assert titles == ["model and data", *sections, "general"]
    assert flags_in(text)[:2] == ["-m", "-d"]
    assert len(flags_in(text)) == len(Config.fields()) + 4, "and --help, --version, --config, --dry-run"
    assert "--help GROUP shows one group of flags: model, data, sampling," in " ".join(text.split())


@pytest.mark.parametrize("group", Config.sections())
def test_one_group_shows_the_flags_of_its_section_alone(capsys, group):
    text = printed(capsys, "-t", "4", "--help", group)
    actions = {action.dest: action.option_strings[0] for action in build_parser()._actions}
    expected = [actions[name] for name in Config.sections()[group].model_fields]
    assert flags_in(text) == [*expected, "-h", "--version", "--config", "--dry-run"]


def test_help_before_another_flag_shows_all_groups(capsys):
    assert printed(capsys, "-h", "-t", "4") == printed(capsys, "--help") == build_parser().format_help()


def test_an_unknown_group_is_refused_with_the_groups():
    with pytest.raises(ConfigError) as caught:
        parse(["--help", "optimiser"])
    assert str(caught.value).startswith("--help optimiser: there is no such group of flags; use model, data, sampling,")
