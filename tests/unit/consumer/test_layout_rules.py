"""Test the requirements of tensor and pipeline parallelism on a model: one refusal per rule."""

import pytest
from transformers import (
    DeepseekV2Config,
    Gemma3Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from coati_rl.config.cli import parse
from coati_rl.errors import ConfigError
from consumer.parallel.layout_rules import (
    EXPERTS,
    TESTED,
    TP_STYLES,
    check_layout,
    check_pipeline_plan,
    tensor_parallel_plan,
)

SIZES = {
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 128,
}


def check_flags(flags, model):
    check_layout(parse(["-m", "models/mine", "-t", "16", *flags.split()])[0], model)


def refusal(flags, model):
    with pytest.raises(ConfigError) as caught:
        check_flags(flags, model)
    return str(caught.value)


@pytest.mark.parametrize("architecture", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_the_tested_architectures_may_be_split_both_ways(architecture):
    model = architecture(**SIZES)
    assert model.model_type in TESTED
    for flags in ("", "-tp 2", "-tp 4", "-pp 3", "-tp 2 -pp 2"):
        assert check_flags(flags, model) is None
    assert set(tensor_parallel_plan(model).values()) <= TP_STYLES
    assert check_pipeline_plan(model) is None


def test_rows_are_shared_where_attention_is_computed_by_segments():
    for architecture in (LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config):
        assert check_flags("--context-parallel 2", architecture(**SIZES)) is None
    message = refusal("--context-parallel 4", GPT2Config())
    assert message == (
        "--context-parallel 4: the attention of the architecture gpt2 is not cut by tokens; "
        "use --context-parallel 1 or llama, mistral, mixtral, olmoe, qwen2, qwen2_moe, qwen3, qwen3_moe "
        "(--model models/mine)"
    )
    assert "deepseek_v2 is not cut by tokens" in refusal("--context-parallel 2", DeepseekV2Config())


def test_experts_are_shared_out_where_ranks_divide_them():
    flags = "--plugin fsdp2 --expert-parallel"
    assert check_flags(f"{flags} 8", MixtralConfig(**SIZES, num_local_experts=16)) is None
    assert refusal(f"{flags} 8", Qwen3MoeConfig(**SIZES, num_experts=12)) == (
        "--expert-parallel 8: must divide num_experts 12; use --expert-parallel 4 (--model models/mine)"
    )
    assert "architecture qwen3 has no experts; use --expert-parallel 1" in refusal(f"{flags} 2", Qwen3Config(**SIZES))
    config = parse(["-m", "models/mine", "-t", "16", *flags.split(), "2"])[0]
    assert check_layout(config, Qwen3Config(**SIZES), "--teacher models/dense") is None


@pytest.mark.parametrize(
    ("change", "tp", "broken", "remedy"),
    [
        ({"num_key_value_heads": 1}, 2, "num_key_value_heads 1", "-tp 1"),
        ({}, 8, "num_key_value_heads 4", "-tp 1 or 2 or 4"),
        ({"num_attention_heads": 6}, 4, "num_attention_heads 6", "-tp 1 or 2"),
        ({"intermediate_size": 98, "vocab_size": 130}, 4, "intermediate_size 98 and vocab_size 130", "-tp 1 or 2"),
        ({"intermediate_size": 97}, 2, "intermediate_size 97", "-tp 1"),
        ({"vocab_size": 130}, 4, "vocab_size 130", "-tp 1 or 2"),
    ],
)  # fmt: skip
def test_a_tp_that_does_not_divide_the_model_is_refused_with_those_that_do(change, tp, broken, remedy):
    model = Qwen3Config(**(SIZES | change))
    assert refusal(f"-tp {tp}", model) == f"-tp {tp}: must divide {broken}; use {remedy} (--model models/mine)"
    for size in remedy.removeprefix("-tp ").split(" or "):
        check_flags(f"-tp {size}", model)


@pytest.mark.parametrize("model", [MixtralConfig, Qwen3MoeConfig])
def test_experts_are_shared_out_whole_if_the_ranks_divide_their_number(model):
    plan = tensor_parallel_plan(model())
    assert plan["layers.*.mlp.experts"] == EXPERTS
    assert not any(pattern.startswith("layers.*.mlp.experts.") for pattern in plan)
    assert check_flags("-tp 2", model(num_local_experts=6)) is None
    assert "-tp 4: must divide num_local_experts 6" in refusal("-tp 4", model(num_local_experts=6)).replace(
        "num_experts 6 and ", ""
    )


def test_a_tied_embedding_changes_nothing():
    tied, free = (Qwen3Config(**SIZES, tie_word_embeddings=is_tied) for is_tied in (True, False))
    assert check_flags("-tp 2", tied) is None
    assert tensor_parallel_plan(tied) == tensor_parallel_plan(free)


def test_more_pipeline_stages_than_layers_are_refused():
    model = Qwen3Config(**SIZES)
    assert refusal("-pp 4", model) == (
        "-pp 4: more stages than num_hidden_layers 3; use -pp 3 or less (--model models/mine)"
    )


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (Phi3Config, "phi3 declares unsupported styles (layers.*.self_attn.qkv_proj: colwise_gather_output, "),
        (OlmoeConfig, "layers.*.self_attn.q_proj: colwise_gather_output"),
        (GPT2Config, "the architecture gpt2 declares no tensor-parallel plan"),
    ],
)
def test_a_plan_with_a_style_that_is_not_handled_is_refused_by_name_with_the_tested_architectures(model, named):
    message = refusal("-tp 2", model())
    assert message.startswith("-tp 2: the architecture ")
    assert named in message
    assert (
        "; use -tp 1 or one of llama, mistral, qwen2, qwen3 (tested); other architectures are tried before a job starts"
        in message
    )
    with pytest.raises(ConfigError, match="tensor parallelism: the architecture"):
        tensor_parallel_plan(model())
    assert check_flags("-tp 1", model()) is None


class _OutsideLayers(PreTrainedConfig):
    model_type = "outside"
    base_model_tp_plan = {"head.layers.*.mlp.up_proj": "colwise"}  # noqa: RUF012


def test_a_plan_for_modules_outside_the_decoder_layers_is_refused():
    assert "unsupported styles (head.layers.*.mlp.up_proj: colwise)" in refusal("-tp 2", _OutsideLayers())


class _OtherParts(PreTrainedConfig):
    model_type = "other"
    num_hidden_layers = 2
    base_model_pp_plan = {"embed_tokens": ([], []), "layers": ([], []), "norm": ([], []), "head_norm": ([], [])}  # noqa: RUF012


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (PhiConfig, "declares unsupported parts (embed_tokens, embed_dropout, layers, final_layernorm)"),
        (_OtherParts, "the architecture other declares unsupported parts (embed_tokens, layers, norm, head_norm)"),
        (GPT2Config, "the architecture gpt2 declares no pipeline plan"),
    ],
)
def test_a_model_of_other_parts_makes_no_pipeline(model, named):
    message = refusal("-pp 2", model())
    assert named in message
    assert (
        "; use -pp 1 or one of llama, mistral, qwen2, qwen3 (tested); other architectures are tried before a job starts"
        in message
    )
    with pytest.raises(ConfigError, match="pipeline parallelism: the architecture"):
        check_pipeline_plan(model())
    assert check_flags("-pp 1", model()) is None


def test_the_plan_of_a_composite_model_is_its_text_models():
    model = Gemma3Config()
    assert tensor_parallel_plan(model)["layers.*.self_attn.o_proj"] == "rowwise"
    assert check_pipeline_plan(model) is None


def test_both_refusals_are_told_at_once():
    lines = refusal("-tp 8 -pp 4", Qwen3Config(**SIZES)).splitlines()
    assert [line.split(":")[0] for line in lines] == ["-tp 8", "-pp 4"]
