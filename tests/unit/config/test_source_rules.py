"""Test generators as sources: how their names are read, and which flags fit them."""

import re
from fractions import Fraction

import pytest

from coati_rl.config.cli import build_config, build_job, parse
from coati_rl.config.generate import GenerateConfig
from coati_rl.config.generate_rules import check_generate
from coati_rl.config.jobs.sft import SftJobConfig
from coati_rl.config.named_paths import DataSource, read_sources
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError
from coati_rl.generator_spec import GeneratorSpec, parse_generator

SUMS = "reasoning_gym:chain_sum"


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        (SUMS, GeneratorSpec(name="chain_sum", parameters={})),
        (f"{SUMS}?min_terms=2&size=50", GeneratorSpec(name="chain_sum", parameters={"min_terms": 2}, size=50)),
        (f"{SUMS}?a=1.5&b=true&c=x%2Cy", GeneratorSpec(name="chain_sum", parameters={"a": 1.5, "b": True, "c": "x,y"})),
        (f"{SUMS}?op=%2B&op=-", GeneratorSpec(name="chain_sum", parameters={"op": ["+", "-"]})),
    ],
)
def test_parameters_are_read_as_json_or_text(text, spec):
    assert parse_generator(text) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reasoning_gym:", "'' names no generator; write reasoning_gym:NAME"),
        (f"{SUMS}?min_terms", "'min_terms' is no PARAMETER=VALUE"),
        (f"{SUMS}?seed=3", "leave the parameter seed out"),
        (f"{SUMS}?size=0", "its size is 0"),
        (f"{SUMS}=many", "the share 'many' is no number above 0"),
    ],
)
def test_other_texts_are_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_sources(text)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        (f"{SUMS}=0.3", "0.3"),
        (f"{SUMS}?max_terms=4", None),
        (f"{SUMS}?max_terms=4=0.5", "0.5"),
        (f"{SUMS}?a=1&b=2=3", "3"),
    ],
)
def test_the_last_number_is_a_share_unless_it_is_a_parameter_s_value(text, share):
    path = text.removesuffix(f"={share}")
    assert read_sources(text) == (DataSource(path=path, share=None if share is None else Fraction(share)),)


def test_a_generator_is_mixed_with_a_file():
    found = read_sources(f"{SUMS}=0.3,b.jsonl=0.7")
    assert [(each.path, each.is_generator) for each in found] == [(SUMS, True), ("b.jsonl", False)]


def rewards_of(**values):
    return {name: each.reward.reward_type for name, each in build_config(values).by_task.items()}


def test_generated_rows_have_the_reward_of_their_generator_and_other_rows_that_of_the_run():
    mixed = f"{SUMS}=1,b.jsonl=1"
    assert rewards_of(dataset=mixed, reward_type="boxed") == {"default": "boxed", "reasoning_gym": "reasoning_gym"}
    assert rewards_of(dataset=mixed, reward_type="none")["reasoning_gym"] == "none"
    by_name = {"dataset": {"sums": f"{SUMS}=1", "math": "b.jsonl=1"}, "reward_type": "boxed"}
    assert rewards_of(**by_name) == {"default": "boxed", "sums": "reasoning_gym", "math": "boxed"}
    own = rewards_of(**by_name, tasks={"sums": {"reward_type": "think_answer_tags"}, "math": {}})
    assert own["sums"] == "think_answer_tags"
    held_out = {"dataset": {"math": "b.jsonl"}, "reward_type": "boxed", "eval_dataset": {"math": f"{SUMS}?size=5"}}
    assert rewards_of(**held_out) == {"default": "boxed", "math": "boxed", "reasoning_gym": "reasoning_gym"}
    evaluated = rewards_of(dataset="b.jsonl", eval_dataset={"sums": f"{SUMS}?size=5"}, reward_type="boxed")
    assert evaluated == {"default": "boxed", "reasoning_gym": "reasoning_gym"}


def refusal(flags):
    with pytest.raises(ConfigError) as caught:
        check(parse(flags.split())[0])
    return str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"-d {SUMS}", f"--dataset {SUMS}: makes rows without end; bound the run with --max-steps N"),
        (f"-d {SUMS} --max-steps 5 -e 2", "--num-episodes 2: rows of"),
        (f"-d {SUMS},b.jsonl --max-steps 5", "would never be drawn; give each a share, SOURCE=SHARE"),
        (f"-d {SUMS} --max-steps 5 --max-samples 9", "--max-samples 9: limits the rows of files, and there is none"),
        (f"-d {SUMS}?size=9 --max-steps 5", "size is the number of rows of an evaluation set"),
        (f"-d {SUMS} --max-steps 5 -rt boxed", "--reward-type boxed: all rows are generated, and scored by the"),
        (
            f'-d {SUMS} --max-steps 5 --tasks {{"reasoning_gym":{{"reward_type":"code"}}}}',
            "--tasks reasoning_gym: reward_type code needs test_cases, which generated rows do not have",
        ),
    ],
)
def test_a_run_on_generated_rows_is_refused_by_name_if_it_cannot_be_meant(flags, message):
    assert message in refusal(flags)


@pytest.mark.parametrize(
    "flags",
    [
        f"-d {SUMS} --max-steps 5",
        f"-d {SUMS} --max-steps 5 -rt reasoning_gym",
        f"-d {SUMS}=0.3,b.jsonl=0.7 --max-steps 5 -rt boxed --max-samples 9",
        f"-d b.jsonl -ed sums={SUMS}?size=5 -rt boxed",
        f'-d {SUMS} --max-steps 5 --tasks {{"reasoning_gym":{{"reward_type":"boxed"}}}}',
    ],
)
def test_runs_on_generated_rows(flags):
    config, _ = parse(flags.split())
    assert check(config) is None, "nothing is refused"


def test_other_jobs_say_what_they_need_instead():
    with pytest.raises(ConfigError, match=r"makes prompts, and this job trains on answers; .* coati-rl generate"):
        build_job({"dataset": SUMS}, SftJobConfig)
    with pytest.raises(ConfigError, match=rf"{SUMS}: makes rows without end; say how many, {SUMS}\?size=100"):
        check_generate(build_job({"dataset": SUMS, "output": "o.jsonl"}, GenerateConfig))
    sized = {"dataset": f"{SUMS}?size=9", "output": "o.jsonl"}
    check_generate(build_job(sized, GenerateConfig))
    check_generate(build_job({**sized, "reward_type": "reasoning_gym"}, GenerateConfig))
    with pytest.raises(ConfigError, match="--reward-type boxed: all rows are generated"):
        check_generate(build_job({**sized, "reward_type": "boxed"}, GenerateConfig))
