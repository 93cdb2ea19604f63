"""Test that samples packed into a row have the hidden states and gradients of each alone under eager attention."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from consumer.models.packed_attention import MODEL_TYPES, NAME, RowParents, packed_attention, row_lengths, row_parents
from tests.cases import one_of

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": NAME,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "mistral, sliding": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)),
    # A window that holds the longest segment below, and not the prefix before it.
    "mistral, wide": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=28)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen2, sliding": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, **SLIDING)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **ROUTED)),
    "qwen2_moe": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**SIZES, **ROUTED, **SLIDING, shared_expert_intermediate_size=16, max_window_layers=0)
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, sliding_window=4)),
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2)),
    "qwen3, sliding": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, **SLIDING)),
}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LENGTHS = ((5, 1, 9), (7, 3, 5))  # three samples in the first row; two and padding in the second


def alone(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """Each sample as a batch of its own, under eager attention with transformers' masks."""
    model.set_attn_implementation("eager")
    rows = [
        torch.cat(
            [model.base_model(input_ids=part[None], use_cache=False).last_hidden_state[0] for part in row.split(n)]
        )
        for row, n in zip(token_ids, LENGTHS, strict=True)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("name", one_of(2, MODELS))
def test_packed_samples_are_as_if_alone(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    token_ids = torch.randint(0, 40, (2, 15))
    position_ids = torch.tensor([[t for n in row for t in range(n)] for row in LENGTHS])
    direction = torch.randn(2, 15, 32)
    packed = model.base_model(
        input_ids=token_ids, position_ids=position_ids, use_cache=False, lengths=LENGTHS
    ).last_hidden_state
    (packed * direction).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.base_model.named_parameters()}
    model.zero_grad()
    expected = alone(model, token_ids)
    (expected * direction).sum().backward()
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-5)
    for parameter_name, p in model.base_model.named_parameters():
        difference = (gradients[parameter_name] - p.grad).norm() / p.grad.norm()
        assert difference < 1e-5, parameter_name


@pytest.mark.parametrize("parents", [None, ((-1, 0, 0), (-1, 0, -1))], ids=["packed", "shared"])
def test_short_samples_in_bfloat16_are_attended_to_in_float32(parents: RowParents | None) -> None:
    """A CPU has no fast bfloat16 kernel for them; the result is rounded once."""
    torch.manual_seed(0)
    module = MODELS["qwen3"]().model.layers[0].self_attn
    tensors = [torch.randn(2, heads, 15, 8).bfloat16().requires_grad_() for heads in (4, 2, 2)]
    wide = [tensor.detach().float().requires_grad_() for tensor in tensors]
    settings = {"lengths": LENGTHS, "parents": parents, "scaling": 0.3, "dropout": 0.0}
    found, _ = packed_attention(module, *tensors, None, **settings)
    right, _ = packed_attention(module, *wide, None, **settings)
    assert torch.equal(found, right.bfloat16())
    direction = torch.randn_like(right).bfloat16()
    (found * direction).sum().backward()
    (right * direction.float()).sum().backward()
    for narrow, whole in zip(tensors, wide, strict=True):
        assert torch.equal(narrow.grad, whole.grad.bfloat16())


def test_long_paths_in_bfloat16_are_attended_to_in_bfloat16_though_their_segments_are_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    module = MODELS["qwen3"]().model.layers[0].self_attn
    tensors = [torch.randn(1, heads, 15, 8).bfloat16() for heads in (4, 2, 2)]
    settings = {"lengths": ((5, 4, 6),), "parents": ((-1, 0, 1),), "scaling": 0.3, "dropout": 0.0}
    found = {}
    for limit in (14, 15, 0):  # the longest path has 15 tokens, the longest segment 6
        monkeypatch.setattr("consumer.models.packed_attention.FLOAT32_ATTENTION", limit)
        found[limit] = packed_attention(module, *tensors, None, **settings)[0]
    assert torch.equal(found[14], found[0])
    assert not torch.equal(found[15], found[0])


def test_rows_of_one_sample_need_no_lengths() -> None:
    torch.manual_seed(0)
    model = MODELS["qwen3"]().eval()
    token_ids = torch.randint(0, 40, (1, 6))
    whole = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
    listed = model.base_model(input_ids=token_ids, use_cache=False, lengths=((6,),)).last_hidden_state
    torch.testing.assert_close(whole, listed)


def test_every_architecture_that_uses_it_is_compared_here() -> None:
    assert {name.split(",")[0] for name in MODELS} == MODEL_TYPES


def test_lengths_are_those_of_the_segments_and_of_the_padding() -> None:
    segments = np.array([[0, 0, 2, -1], [0, 2, 1, -1], [0, 3, 3, -1], [1, 0, 4, -1]], dtype=np.int32)
    assert row_lengths(segments, (2, 6)) == ((2, 1, 3), (4, 2))


def test_padding_does_not_make_a_row_packed() -> None:
    assert row_lengths(np.array([[0, 0, 3, -1], [1, 0, 5, -1]], dtype=np.int32), (2, 5)) is None
    assert row_lengths(np.empty((0, 4), dtype=np.int32), (1, 5)) is None


# A prompt of six tokens, four responses to it, of one token, of two, the second of which has a child of its own, and of
# more than four prompts; a sample beside; padding.
TREE = np.array(
    [[0, 0, 6, -1], [0, 6, 1, 0], [0, 7, 2, 0], [0, 9, 2, 2], [0, 11, 25, 0], [0, 36, 4, -1]], dtype=np.int32
)
TREE_LENGTHS = ((6, 1, 2, 2, 25, 4, 2),)
TREE_PARENTS = ((-1, 0, 0, 2, 0, -1, -1),)
PATHS = ([*range(7)], [*range(6), 7, 8, 9, 10], [*range(6), *range(11, 36)], [*range(36, 40)])  # root to leaf
TREE_POSITIONS = [*range(6), 6, 6, 7, 8, 9, *range(6, 31), *range(4), 0, 1]


def test_parents_are_named_by_their_place_in_the_row() -> None:
    lengths = row_lengths(TREE, (1, 42))
    assert lengths == TREE_LENGTHS
    assert row_parents(TREE, lengths) == TREE_PARENTS
    rows = np.array([[0, 0, 2, -1], [0, 2, 2, 0], [1, 0, 1, -1], [1, 1, 1, 2]], dtype=np.int32)
    assert row_parents(rows, row_lengths(rows, (2, 4))) == ((-1, 0), (-1, 0, -1))


def test_rows_without_a_parent_have_no_parents() -> None:
    segments = np.array([[0, 0, 2, -1], [0, 2, 1, -1]], dtype=np.int32)
    assert row_parents(segments, row_lengths(segments, (1, 3))) is None
    assert row_parents(segments[:1], None) is None


def test_a_parent_comes_before_its_child_in_the_same_row() -> None:
    later = np.array([[0, 0, 2, 1], [0, 2, 2, -1]], dtype=np.int32)
    with pytest.raises(ValueError, match="segment 0 names 1 as its parent"):
        row_parents(later, row_lengths(later, (1, 4)))
    other = np.array([[0, 0, 2, -1], [0, 2, 2, -1], [1, 0, 2, 0]], dtype=np.int32)
    with pytest.raises(ValueError, match="segment 2 names 0 as its parent, which is not before it in row 1"):
        row_parents(other, row_lengths(other, (2, 4)))


@pytest.mark.parametrize("name", one_of(2, reversed(MODELS)))  # those that the fast suite does not pack
def test_sequences_that_share_a_prefix_have_the_hidden_states_and_gradients_that_they_have_alone(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    token_ids, direction = torch.randint(0, 40, (1, 42)), torch.randn(42, 32)
    shared = model.base_model(
        input_ids=token_ids,
        position_ids=torch.tensor([TREE_POSITIONS]),
        use_cache=False,
        lengths=TREE_LENGTHS,
        parents=TREE_PARENTS,
    ).last_hidden_state[0]
    (shared * direction)[:40].sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.base_model.named_parameters()}
    model.zero_grad()
    model.set_attn_implementation("eager")
    own, seen = torch.zeros(()), set[int]()
    for path in PATHS:  # each token counts once, in the first sequence that holds it
        hidden = model.base_model(input_ids=token_ids[:, path], use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(shared[path], hidden, rtol=1e-4, atol=1e-5)
        new = [index for index, place in enumerate(path) if place not in seen]
        own = own + (hidden[new] * direction[[path[index] for index in new]]).sum()
        seen |= set(path)
    assert seen == {*range(40)}
    own.backward()
    for parameter_name, p in model.base_model.named_parameters():
        assert (gradients[parameter_name] - p.grad).norm() / p.grad.norm() < 1e-5, parameter_name
