"""Test that each pair of settings of the table is refused together, and neither of them alone."""

import itertools
from contextlib import suppress
from typing import Any

import pytest

from coati_rl.config.cli import parse_job
from coati_rl.config.commands import ALL
from coati_rl.config.config import Config
from coati_rl.config.conflicts import CONFLICTS, conflict_problems
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError

# A value that is not the default, or that a pattern takes; of flags without a value, none.
VALUES = {
    **{"--env": "/w.py:W", "--tools": "calculator", "--mcp-server": "serve", "--agent-command": "agent"},
    **{"--env textarena:*": "textarena:Game", "--input-template": "{}", "--chat-template": "chatml"},
    **{"--chat-template-kwargs": '{"a": 1}', "--system-prompt ?*": "hi", "--policy-loss *:*": "/a.py:f"},
    **{"--reward-combine": "/c.py:c", "--reward-clip": "0,1", "--turn-advantages": "0", "--length-lambda": "0.5"},
    **{"--gae-lambda": "0.5", "--off-policy-correction": "tis", "--on-logprob-gap": "tis", "--top-k": "5"},
    **{"--top-p": "0.5", "--min-p": "0.5", "--off-policy-mask-threshold": "0.5", "--warmup-ratio": "0.5"},
    **{"--warmup-steps": "5", "--max-num-seqs": "4", "--router-replay": "measure", "--join-port": "8443", "-ptp": "2"},
    **{"--max-producers": "4", "--reference-update": "every=2", "--lora-rank": "4", "--adapter": "/adapter"},
    **{"--ref-devices": "1", "--quantization": "fp8", "-tp": "2", "-pp": "2", "-zero": "1", "--fsdp-size": "2"},
    **{"--expert-parallel": "2", "--reward-template": "{input}{reward}", "-g": "2", "-b *://*": "http://host:1"},
    "--engine-arg *quantization?config=*": 'quantization-config={"a":1}',
}
PAIRS = [
    (left, right, why) for lefts, rights, why in CONFLICTS for left in lefts.split(", ") for right in rights.split(", ")
]


def words(text: str) -> list[list[str]]:
    """Return what a flag of the table stands for on the command line, for each of its values."""
    flag, _, values = text.partition(" ")
    given = values.split("|") if values else [""]
    found = [VALUES.get(f"{flag} {each}".strip(), each) for each in given]
    return [[f"{flag}={value}"] if value else [flag] for value in found]


def parsed(argv: list[str], job: Any) -> Any:
    return parse_job([*(["-kl", "0"] if job is Config else []), *argv], job)[0]


def problems(argv: list[str], job: Any) -> list[str]:
    return [*conflict_problems(parsed(argv, job))]


def job_with(argv: list[str]) -> Any:
    """Return the first command that takes these flags."""
    for job in ALL.values():
        with suppress(ConfigError):
            parsed(argv, job)
            return job
    raise AssertionError(f"no command takes {argv}")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("left", "right", "why"), PAIRS, ids=[f"{left} {right}" for left, right, _ in PAIRS])
def test_two_settings_are_refused_together_and_neither_alone(left: str, right: str, why: str) -> None:
    sides, reason = [text.partition(" ")[0] for text in (left, right)], why.partition("{")[0]
    for one, other in itertools.product(words(left), words(right)):
        job = job_with([*one, *other])
        (problem,) = [each for each in problems([*one, *other], job) if reason in each]
        assert all(flag in problem.partition(":")[0] for flag in sides)
        is_default = parsed(other, job) == parsed([], job)
        assert any(reason in each for each in problems(one, job)) == is_default
        assert not any(reason in each for each in problems(other, job))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--turn-advantages 0.9 --reward-clip 0,1", "--turn-advantages 0.9 with --reward-clip: "),
        ("-t 2 -tp 2 --lora-rank 4 --load-in-4bit", "--load-in-4bit with -tp 2: weights in 4 bits are not cut; "),
        ("--partial-rollouts --tools calculator -nb 1", "--partial-rollouts with --tools calculator: its "),
    ],
)  # fmt: skip
def test_the_message_names_numbers_and_choices_but_no_texts(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(parse_job(text.split(), Config)[0])
    assert str(caught.value).startswith(message)


def test_of_several_flags_the_given_ones_are_named_and_their_defaults_are_the_remedy() -> None:
    (problem,) = problems(["--off-policy-correction", "icepop", "-topk", "50", "-topp", "0.9"], Config)
    assert problem.startswith("--off-policy-correction icepop with --top-k 50 and --top-p 0.9: ")
    assert problem.endswith("all tokens (--top-k None --top-p 1), or use --off-policy-correction none")


def test_what_a_task_sets_is_refused_by_its_name() -> None:
    argv = ["-d", "a=a.jsonl", "--tasks", '{"a": {"top_k": 5}}', "--off-policy-correction", "tis"]
    with pytest.raises(ConfigError, match=r"^--tasks a: --off-policy-correction tis with --top-k 5"):
        check(parse_job(argv, Config)[0])
