"""Test what is taken where ColossalAI or vLLM is not installed, as after `pip install` of the wheel."""

import importlib.util

import pytest

import rl_example
from coati_rl.config import installed
from coati_rl.config.cli import parse_job
from coati_rl.config.commands import ALL
from coati_rl.config.installed import with_installed
from coati_rl.errors import ConfigError


@pytest.fixture
def lacks(monkeypatch):
    """Hide packages."""

    def hide(*names: str) -> None:
        monkeypatch.setattr(
            installed, "find_spec", lambda name: None if name in names else importlib.util.find_spec("json")
        )

    return hide


def taken(command: str, *flags: str):
    """The plugin and the backend, None where the command has none, and what is said."""
    said: list[str] = []
    config = with_installed(parse_job(["-m", "model", *flags], ALL[command])[0], said.append)
    values = config.flat("json")
    return values.get("plugin"), values.get("backend"), said


@pytest.mark.parametrize(
    ("command", "plugin", "backend"),
    [
        ("rl", "fsdp2", "transformers"),
        ("sft", "fsdp2", None),
        ("generate", None, "transformers"),
        ("serve", None, "transformers"),
    ],
)
def test_a_default_that_is_not_installed_is_replaced_with_a_warning(lacks, command, plugin, backend) -> None:
    lacks("colossalai", "vllm")
    *values, said = taken(command)
    assert values == [plugin, backend]
    assert len(said) == (plugin is not None) + (backend is not None)
    assert all("is not installed" in line and "is taken" in line for line in said)


def test_with_both_installed_nothing_changes_and_nothing_is_said(lacks) -> None:
    lacks()
    assert taken("rl") == ("hybrid", "vllm", [])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-b", "vllm"], "-b vllm: the package vllm is not installed; use -b transformers, a slower engine"),
        (
            ["--plugin", "hybrid"],
            "--plugin hybrid: the package colossalai is not installed; use --plugin fsdp2, without",
        ),
    ],
)
def test_what_the_user_has_written_is_refused_with_the_remedy(lacks, flags, message) -> None:
    lacks("colossalai", "vllm")
    with pytest.raises(ConfigError, match=message):
        taken("rl", *flags)
    assert taken("rl", "-b", "fake", "--plugin", "fsdp2") == ("fsdp2", "fake", [])


@pytest.mark.parametrize("flag", ["-b", "--plugin"])
def test_a_command_ends_with_2_before_anything_is_read(lacks, capsys, tmp_path, flag) -> None:
    lacks("colossalai", "vllm")
    value = {"-b": "vllm", "--plugin": "hybrid"}[flag]
    assert rl_example.main(["-m", "/no/model", "-d", "/no/data.jsonl", flag, value], tmp_path) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"rl_example.py: {flag} {value}: the package")
