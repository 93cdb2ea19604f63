"""Test the rules of engine settings: what has no effect or cannot run is refused with a remedy."""

import pytest

from coati_rl.config.cli import parse, parse_job
from coati_rl.config.engine_rules import check_engine_device, check_engines, engine_warnings
from coati_rl.config.generate import GenerateConfig
from coati_rl.config.generate_rules import check_generate
from coati_rl.config.named_values import named_values
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError


def config_of(text):
    return parse(text.split())[0]


def refusal(call, *arguments, **options):
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **options)
    return str(caught.value)


def test_engine_arguments_are_json_or_text_and_hyphens_are_underscores():
    config = config_of('--engine-arg a-b=3 --engine-arg c={"d":1.5} --engine-arg e=fp8 --engine-arg f=a=b')
    assert named_values(config.sampling.engine_arg) == {"a_b": 3, "c": {"d": 1.5}, "e": "fp8", "f": "a=b"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--engine-arg x", "'x' is no argument; write NAME=VALUE"),
        ("--engine-arg a_b=1 --engine-arg a-b=2", "a_b is given twice"),
        ("--block-size 33", "multiple of 16"),
    ],
)
def test_a_malformed_argument_is_refused(text, message):
    assert message in refusal(config_of, text)


@pytest.mark.parametrize(("text", "value"), [("", None), ("--enforce-eager", True), ("--no-enforce-eager", False)])
def test_eager_is_on_off_or_left_to_the_device(text, value):
    assert config_of(text).sampling.enforce_eager is value


@pytest.mark.parametrize("flag", ["--block-size 32", "--quantization fp8", "--no-enforce-eager", "--engine-arg a=1"])
@pytest.mark.parametrize("backend", ["transformers", "fake"])
def test_what_only_vllm_has_is_refused_for_another_engine(flag, backend):
    assert refusal(check, config_of(f"-b {backend} {flag}")) == (
        f"{flag} with -b {backend}: only vLLM has it; use -b vllm, or leave it out"
    )
    config = parse_job(f"-m m -d d -o o -b {backend} {flag}".split(), GenerateConfig)[0]
    assert f"{flag} with -b {backend}" in refusal(check_generate, config)
    check(config_of(flag))


def test_more_samples_than_are_in_flight_cannot_be_decoded():
    check(config_of("-imbs 8 -g 8 --max-num-seqs 64"))
    assert refusal(check, config_of("-imbs 8 -g 8 --max-num-seqs 65")) == (
        "--max-num-seqs 65: has no effect, as imbs * g = 8 * 8 = 64 samples are in flight; use -imbs 9, or leave it out"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--engine-arg enable_chunked_prefill=true", "cannot cut the prompt of a request with a seed; leave it out"),
        ("-mpt 100 -mnt 50 --engine-arg max_num_batched_tokens=149", "a sample may have 150 tokens; use 150 or more"),
        ("-mpt 100 -mnt 50 --engine-arg max_num_scheduled_tokens=149", "a sample may have 150 tokens; use 150 or more"),
        ("--block-size 48", "on the CPU vLLM takes multiples of 32; use 64"),
    ],
)
def test_what_the_cpu_does_not_take_is_refused_there_alone(text, message):
    config = config_of(text)
    assert message in refusal(check_engine_device, config.sampling, "cpu", max_model_len=config.max_model_len)
    check_engine_device(config.sampling, "cuda", max_model_len=config.max_model_len)
    enough = config_of("-mpt 100 -mnt 50 --engine-arg max_num_batched_tokens=150 --block-size 64")
    check_engine_device(enough.sampling, "cpu", max_model_len=150)


def test_a_quantized_engine_is_not_measured_by_the_limit_of_float32():
    config = config_of("--quantization fp8")
    assert "use --on-logprob-gap tis, or --max-logprob-gap" in refusal(check_engines, config, "cpu")
    for text in ("", "--quantization fp8 --on-logprob-gap tis", "--quantization fp8 --max-logprob-gap 0.1"):
        check_engines(config_of(text), "cpu")
    check_engines(config, "cuda")
    check_engines(config_of("--quantization fp8 --precision bf16"), "cpu")


def test_a_quantized_engine_without_a_correction_is_warned_about():
    (warning,) = engine_warnings(config_of("--quantization fp8"))
    assert "--off-policy-correction tis" in warning
    assert [*engine_warnings(config_of("--quantization fp8 --off-policy-correction tis"))] == []
    assert [*engine_warnings(config_of(""))] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-nb 0", "no response is unfinished at the end of a rollout step there; use --n-behind 1 or more"),
        ("-nb 1 -b transformers", "it decodes a batch to its end; use -b vllm"),
        ("-nb 1 --env w.py:W", "its episodes hold their places while they wait for it; use --inflight-update"),
        ("-nb 1 --tools calculator", "its episodes hold their places while they wait for it; use --inflight-update"),
    ],
)
def test_partial_rollouts_are_refused_where_nothing_could_go_on(text, message):
    assert message in refusal(check, config_of(f"--partial-rollouts {text}"))


def test_partial_rollouts_change_weights_in_flight():
    config = config_of("--partial-rollouts -nb 1")
    check(config)
    assert config.sync.commits_in_flight
    assert not config_of("-nb 1").sync.commits_in_flight
    assert config_of("-nb 1 --inflight-update").sync.commits_in_flight
