"""Test that a run refuses penalties by name, with the reason, wherever they are written; batch inference has one."""

import pytest

from coati_rl.config.cli import build_config, parse, parse_job
from coati_rl.config.commands import OFFLINE
from coati_rl.config.generate import GenerateConfig
from coati_rl.errors import ConfigError

REASON = (
    "changes the logits of tokens that came before, and trainers compute log-probabilities without that, so that they "
    "would train another distribution than the one that was sampled from; leave it out"
)


def refusal(make, *given):
    with pytest.raises(ConfigError) as raised:
        make(*given)
    return str(raised.value)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--repetition-penalty", "1.1"], f"--repetition-penalty 1.1: {REASON} (coati-rl generate has it)"),
        (["--repetition_penalty=1.1"], f"--repetition_penalty 1.1: {REASON} (coati-rl generate has it)"),
        (["--rollout.presence_penalty", "0.5"], f"--rollout.presence_penalty 0.5: {REASON}"),
        (["--frequency-penalty", "--min-p", "0.1"], f"--frequency-penalty: {REASON}"),
        (["--frequency-penalty"], f"--frequency-penalty: {REASON}"),
    ],
)
def test_on_the_command_line(argv, told):
    assert refusal(parse, argv) == told


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("repetition_penalty: 1.1", "repetition_penalty"),
        ("sampling: {repetition_penalty: 1.1}", "sampling.repetition_penalty"),
    ],
)
def test_in_a_file(tmp_path, text, name):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    told = f"--config {path}: {name} 1.1: {REASON} (coati-rl generate has it)"
    assert refusal(parse, ["--config", str(path)]) == told


def test_in_python_and_of_a_task():
    assert refusal(build_config, {"presence_penalty": 1}) == f"presence_penalty 1: {REASON}"
    of_task = refusal(build_config, {"tasks": {"math": {"presence_penalty": 1}}})
    assert of_task == f"--tasks 'math': presence_penalty 1: {REASON}"


def test_batch_inference_has_a_penalty_and_other_jobs_name_the_command_that_has_it():
    config, _ = parse_job(["--repetition-penalty", "1.1"], GenerateConfig)
    assert config.sampling.repetition_penalty == 1.1
    assert "greater than 0" in refusal(parse_job, ["--repetition-penalty", "0"], GenerateConfig)
    told = "--repetition-penalty: is a flag of coati-rl generate, and coati-rl sft lacks it"
    assert refusal(parse_job, ["--repetition-penalty", "1.1"], OFFLINE["sft"]) == told
