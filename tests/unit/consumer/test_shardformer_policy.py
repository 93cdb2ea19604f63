"""Test which modules ColossalAI replaces in a model, and which ones a pipeline stage holds."""

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from torch import nn

from coati_rl.errors import ConfigError
from tests.unit.consumer.conftest import make_model

if TYPE_CHECKING:  # it brings ColossalAI: seconds, which collecting tests can do without
    from consumer.parallel.shardformer_policy import DecoderPolicy


def make_policy(model: nn.Module, *, tensor: bool = False, stage: int | None = None) -> "DecoderPolicy":
    """`stage`: of two stages, of one layer each; None: there is no pipeline."""
    from consumer.parallel.shardformer_policy import DecoderPolicy

    manager = SimpleNamespace(stage=stage, distribute_layers=lambda num_layers: [1, 1])
    policy = DecoderPolicy()
    policy.set_model(model)
    policy.set_shard_config(
        SimpleNamespace(
            enable_tensor_parallelism=tensor,
            tensor_parallel_process_group=None,
            pipeline_stage_manager=None if stage is None else manager,
        )
    )
    return policy


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_projections_are_cut_by_columns_on_the_way_in_and_by_rows_on_the_way_out(model_type: str) -> None:
    from consumer.parallel import colossal_compat as colossal

    model = make_model(model_type)
    policy = make_policy(model, tensor=True).module_policy()
    layer = policy[type(model.base_model.layers[0])].sub_module_replacement
    columns = {f"self_attn.{name}_proj" for name in "qkv"} | {"mlp.gate_proj", "mlp.up_proj"}
    assert {each.suffix for each in layer if issubclass(each.target_module, colossal.Linear1D_Col)} == columns
    assert {each.suffix for each in layer if issubclass(each.target_module, colossal.Linear1D_Row)} == {
        "self_attn.o_proj",
        "mlp.down_proj",
    }
    (embedding,) = policy[type(model.base_model)].sub_module_replacement
    (head,) = policy[type(model)].sub_module_replacement
    assert (embedding.suffix, head.suffix) == ("embed_tokens", "lm_head")
    assert issubclass(embedding.target_module, colossal.VocabParallelEmbedding1D)
    assert issubclass(head.target_module, colossal.VocabParallelLMHead1D)
    assert embedding.kwargs == head.kwargs == {"make_vocab_size_divisible_by": 1}  # nothing is padded


def test_without_tensor_parallelism_only_the_forward_is_replaced() -> None:
    model = make_model()
    policy = make_policy(model).module_policy()
    assert list(policy) == [type(model)]
    assert list(policy[type(model)].method_replacement) == ["forward"]
    assert not policy[type(model)].sub_module_replacement


def test_the_stages_hold_every_module_once_and_the_rotary_embedding_each() -> None:
    model = make_model()
    base = model.base_model
    first, last = (make_policy(model, stage=stage).get_held_layers() for stage in (0, 1))
    assert first == [base.rotary_emb, base.layers[0], base.embed_tokens]
    assert last == [base.rotary_emb, base.layers[1], base.norm, model.lm_head]


def test_an_architecture_without_a_plan_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="tensor parallelism: the architecture gpt2 declares no tensor-parallel plan"):
        make_policy(make_model("gpt2", n_embd=32, n_layer=2, n_head=2), tensor=True)
