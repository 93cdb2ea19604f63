"""Test the rules of engine settings: what has no effect or cannot run is refused with a remedy."""

from types import SimpleNamespace

import pytest

from coati_rl.config.cli import parse
from coati_rl.config.engine_rules import check_engine_device, check_engines, check_experts, check_width, engine_warnings
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


@pytest.mark.parametrize(
    ("text", "most", "formula"),
    [
        ("", 64, "imbs * g = 64"),
        ("--eval-temperature 1 --eval-samples 7", 64, "imbs * g = 64"),
        ("--eval-temperature 1 --eval-samples 16", 128, "imbs * eval-samples = 128"),
        ("-nb 1 --partial-rollouts", 71, "imbs * g + g - 1 = 71"),
        ("-a REMAX", 72, "imbs * (g + 1) = 72"),
        ("-a REMAX -nb 1 --partial-rollouts", 80, "imbs * (g + 1) + (g + 1) - 1 = 80"),
        ("-a REMAX --eval-temperature 1 --eval-samples 16", 128, "imbs * eval-samples = 128"),
        ("-nb 1 --partial-rollouts --eval-temperature 1 --eval-samples 16", 135, "imbs * eval-samples + g - 1 = 135"),
    ],
)
def test_more_samples_than_are_in_flight_cannot_be_decoded(text, most, formula):
    check(config_of(f"-imbs 8 -g 8 --max-num-seqs {most} {text}"))
    assert refusal(check, config_of(f"-imbs 8 -g 8 --max-num-seqs {most + 1} {text}")) == (
        f"--max-num-seqs {most + 1}: has no effect, as at most {formula} samples are in flight; use -imbs 9, "
        "or leave it out"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--engine-arg enable_chunked_prefill=true", "cannot cut the prompt of a request with a seed; leave it out"),
        ("--engine-arg long-prefill-token-threshold=64", "long_prefill_token_threshold=64: on the CPU vLLM cannot cut"),
        ("-mpt 100 -mnt 50 --engine-arg max_num_batched_tokens=149", "a sample may have 150 tokens; use 150 or more"),
        ("-mpt 100 -mnt 50 --engine-arg max_num_scheduled_tokens=149", "a sample may have 150 tokens; use 150 or more"),
        ("--block-size 48", "on the CPU vLLM takes multiples of 32; use 64"),
    ],
)
def test_what_the_cpu_does_not_take_is_refused_there_alone(text, message):
    config = config_of(text)
    sizes = {"max_model_len": config.max_model_len, "max_num_seqs": 8}
    assert message in refusal(check_engine_device, config.sampling, "cpu", **sizes)
    check_engine_device(config.sampling, "cuda", **sizes)
    enough = config_of(
        "-mpt 100 -mnt 50 --engine-arg max_num_batched_tokens=150 --engine-arg long_prefill_token_threshold=0 "
        "--block-size 64"
    )
    check_engine_device(enough.sampling, "cpu", max_model_len=150, max_num_seqs=149)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_step_of_the_engine_has_a_token_of_each_sample_and_of_a_probe(device):
    config = config_of("-imbs 8 -g 8 -mpt 32 -mnt 32 --engine-arg max_num_batched_tokens=64")
    assert refusal(check_engines, config, device) == (
        "--engine-arg max_num_batched_tokens=64: a step computes a token of each of 64 samples, and of a probe of new "
        "weights; use 65 or more, or --max-num-seqs 63"
    )
    check_engines(config.with_changes(max_num_seqs=63), device)


@pytest.mark.parametrize(
    ("model_type", "flag", "message"),
    [
        ("deepseek_v2", None, "-b vllm: on the CPU vLLM does not compute the attention of a deepseek_v2; use -b tr"),
        ("qwen3_moe", "--adapter", "--adapter: on the CPU vLLM computes no adapters beside the experts of a qwen3_moe"),
    ],
)
def test_experts_that_vllm_does_not_compute_on_the_cpu_are_refused_there_alone(model_type, flag, message):
    experts = SimpleNamespace(model_type=model_type)
    assert refusal(check_experts, experts, "cpu", backend="vllm", adapters=flag).startswith(message)
    check_experts(experts, "cuda", backend="vllm", adapters=flag)
    check_experts(experts, "cpu", backend="transformers")
    check_experts(SimpleNamespace(model_type="mixtral"), "cpu", backend="vllm")
    check_experts(SimpleNamespace(model_type="qwen3"), "cpu", backend="vllm", adapters="--lora-sync adapter")


def test_the_cache_is_sized_by_bytes_on_the_cpu_alone():
    config = config_of("--engine-arg kv_cache_memory_bytes=1000000")
    check_engines(config, "cpu")
    assert "use that flag" in refusal(check_engines, config, "cuda")


QUANTIZED = ["--quantization fp8", "--engine-arg kv_cache_dtype=fp8"]


@pytest.mark.parametrize(
    ("flag", "precision", "is_exact"),
    [
        (QUANTIZED[0], "fp32", False),
        (QUANTIZED[0], "bf16", False),
        (QUANTIZED[1], "fp32", False),
        (QUANTIZED[1], "bf16", False),
        ("--engine-arg kv-cache-dtype=bfloat16", "fp32", False),
        ("--engine-arg kv-cache-dtype=bfloat16", "bf16", True),
        ("--engine-arg kv_cache_dtype=auto", "fp32", True),
    ],
)
def test_a_quantized_engine_is_not_measured_by_the_limit_of_rounding(flag, precision, is_exact):
    text = f"{flag} --precision {precision}"
    for accepted in (f"{text} --on-logprob-gap tis", f"{text} --max-logprob-gap 1", *([text] if is_exact else [])):
        check_engines(config_of(accepted), "cpu")
    if not is_exact:
        message = refusal(check_engines, config_of(text), "cpu")
        assert message.startswith(f"{flag.replace('kv-cache-dtype', 'kv_cache_dtype')} with --precision {precision}")
        assert "use --on-logprob-gap tis, or --max-logprob-gap" in message


@pytest.mark.parametrize("flag", [*QUANTIZED, '--engine-arg quantization_config={"ignore":[]}'])
def test_a_quantized_engine_without_a_correction_is_warned_about(flag):
    (warning,) = engine_warnings(config_of(flag))
    assert warning.startswith(f"{flag.partition('={')[0]}: samples come from the quantized policy")
    assert "--off-policy-correction tis" in warning
    assert [*engine_warnings(config_of(f"{flag} --off-policy-correction tis"))] == []


@pytest.mark.parametrize("text", ["", "--engine-arg kv_cache_dtype=auto", "--engine-arg kv_cache_dtype=bfloat16"])
def test_an_engine_that_is_not_quantized_is_not_warned_about(text):
    assert [*engine_warnings(config_of(text))] == []


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


def test_an_engine_has_as_many_ranks_as_divide_the_heads():
    heads = SimpleNamespace(num_attention_heads=28)
    check_width(parse(["-ptp", "4"])[0], heads)
    check_width(parse(["-ptp", "4"])[0], SimpleNamespace())  # an architecture that has other names
    with pytest.raises(ConfigError, match=r"-ptp 8: must divide num_attention_heads 28; use -ptp 1 or 2 or 4 or 7"):
        check_width(parse(["-ptp", "8"])[0], heads)
