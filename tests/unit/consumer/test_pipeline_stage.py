"""A decoder cut into stages computes what the whole computes, bit for bit, or is refused."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from coati_rl.errors import ConfigError
from consumer.models import packed_attention
from consumer.models.policy_model import PolicyInput, attention_arguments, make_input, policy_forward
from consumer.parallel.pipeline_stage import Stage, check_stages, run_layers, stage_forward, stages_of
from tests.unit.consumer.conftest import make_micro_batch, make_model

SLIDING = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2, sliding": ("qwen2", SLIDING),
    "qwen3": ("qwen3", {}),
    "qwen3, sliding": ("qwen3", SLIDING),
    "llama": ("llama", {"attention_bias": True}),
    "mistral, sliding": ("mistral", {"sliding_window": 3}),
    "olmo2": ("olmo2", {}),  # through transformers' own masks
    "gemma": ("gemma", {}),  # its embedding scales itself
}
PACKED = make_micro_batch(([1, 2, 3, 4, 5], 2), ([6, 7, 8, 9], 1), ([3, 1, 4, 1, 5, 9], 3))


def make(name: str, **settings: object) -> PreTrainedModel:
    model_type, own = MODELS[name]
    attention = packed_attention.NAME if model_type in packed_attention.MODEL_TYPES else "sdpa"
    model = make_model(model_type, **{"num_hidden_layers": 3, **own, **settings})
    model.set_attn_implementation(attention)
    return model


def packed_input(**settings: object) -> PolicyInput:
    return make_input(PACKED, device=torch.device("cpu"), **settings)


def in_stages(model: PreTrainedModel, inputs: PolicyInput, layers_per_stage: list[int]) -> Tensor:
    hidden: Tensor | None = None
    for stage in stages_of(layers_per_stage):
        hidden = run_layers(model, inputs, hidden, stage)
    return hidden


def test_stages_follow_one_another() -> None:
    assert stages_of([2, 1, 1]) == [
        Stage(first=0, last=2, is_first=True, is_last=False),
        Stage(first=2, last=3, is_first=False, is_last=False),
        Stage(first=3, last=4, is_first=False, is_last=True),
    ]
    assert stages_of([4]) == [Stage(first=0, last=4, is_first=True, is_last=True)]


@torch.no_grad()
@pytest.mark.parametrize("layers_per_stage", [[3], [2, 1], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_pass_the_stages_as_they_pass_the_model(name: str, layers_per_stage: list[int]) -> None:
    model, inputs = make(name), packed_input()
    whole = model.base_model(
        input_ids=inputs.token_ids, use_cache=False, **attention_arguments(model, inputs)
    ).last_hidden_state
    assert torch.equal(in_stages(model, inputs, layers_per_stage), whole)
    check_stages(model, layers_per_stage)


@torch.no_grad()
def test_the_last_stage_ends_where_the_policys_forward_ends() -> None:
    model, inputs = make("qwen3"), packed_input()
    first, last = stages_of([2, 1])
    hidden = stage_forward(model, iter([inputs]), torch.empty(1, 0), stage=first)
    assert hidden.keys() == {"hidden_states"}
    logprobs, sums = stage_forward(model, iter([inputs]), torch.empty(1, 0), **hidden, stage=last)
    assert torch.equal(logprobs, policy_forward(model, inputs)[0])
    assert sums == {}


def test_a_stage_that_is_not_the_first_needs_what_the_one_before_sends() -> None:
    with pytest.raises(ValueError, match="needs the hidden states of the one before"):
        run_layers(make("qwen3"), packed_input(), None, stages_of([2, 1])[1])


@pytest.mark.parametrize(
    ("model_type", "settings", "class_name"),
    [
        ("granite", {"embedding_multiplier": 2.0}, "GraniteForCausalLM"),  # scales its embeddings in its forward
        ("gpt2", {}, "GPT2LMHeadModel"),  # has other modules
    ],
)
def test_an_architecture_whose_forward_does_more_is_refused_by_name(
    model_type: str, settings: dict[str, object], class_name: str
) -> None:
    with pytest.raises(ConfigError, match=f"--pipeline-parallel-size 2: {class_name} cannot be cut .*; use -pp 1"):
        check_stages(make_model(model_type, **settings), [1, 1])


def test_the_same_architecture_is_taken_if_it_does_no_more() -> None:
    model = make_model("granite")
    check_stages(model, [1, 1])
    assert model.config.embedding_multiplier == 1.0


def test_a_model_with_a_sliding_window_shorter_than_the_samples_is_not_the_one_without() -> None:
    """So that the comparisons above would notice a window that is left out."""
    inputs = packed_input()
    with torch.no_grad():
        sliding, full = (make("mistral, sliding", sliding_window=window) for window in (3, None))
        assert not torch.equal(in_stages(sliding, inputs, [2, 1]), in_stages(full, inputs, [2, 1]))
