"""Test that arguments of other systems are answered by what they are here, and that the answers fit the pages."""

import make_other_names
import pytest

from coati_rl import __version__
from coati_rl.config.cli import parse, parse_job
from coati_rl.config.commands import OFFLINE
from coati_rl.config.other_names import answer_for
from coati_rl.errors import ConfigError


def test_the_answers_are_those_of_the_pages() -> None:
    current = make_other_names.FILE.read_text(encoding="utf-8")
    assert current == make_other_names.text(), "run python scripts/make_other_names.py"


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--max_completion_length", "TRL's is -mnt here"),
        ("--n-samples-per-prompt", "OpenRLHF's is -g here"),
        ("--rollout.n", "verl's is -g here"),
        ("--tools-per-turn", None),
        ("--lora_rank", "OpenRLHF's is --lora-rank, --lora-alpha"),
        (
            "--trust-remote-code",
            "TRL has it, and it is not needed here, because code of a model directory is never run",
        ),
    ],
)
def test_a_name_of_another_system_is_answered_with_ours(flag: str, answer: str | None) -> None:
    found = answer_for(flag)
    assert found is None if answer is None else (found or "").startswith(answer)


def test_an_unknown_flag_is_looked_up_in_other_systems_before_ours() -> None:
    with pytest.raises(ConfigError, match=r"^unknown flag --max_completion_length; TRL's is -mnt here$"):
        parse(["--max_completion_length", "256"])
    with pytest.raises(ConfigError, match=r"^unknown flag --data\.max_prompt_length; verl's is -mpt here$"):
        parse(["--data.max_prompt_length", "256"])
    with pytest.raises(ConfigError, match=r"^unknown flag --learnig-rate; did you mean --learning-rate\?$"):
        parse(["--learnig-rate", "1"])


def test_the_same_holds_for_jobs() -> None:
    with pytest.raises(ConfigError, match=r"^unknown flag --normalize_reward; OpenRLHF has it, Coati-RL does not yet"):
        parse_job(["--normalize_reward", "8"], OFFLINE["sft"])


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"rl_example.py {__version__}\n"
