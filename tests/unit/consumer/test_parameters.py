"""Test what is known of every parameter, and the arithmetic of shards and slices; no process group is needed for
either.
"""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from coati_rl.errors import ConfigError
from consumer.parallel.layout import Layout
from consumer.parallel.parameters import LocalParameters, ParameterInfo, describe_parameters, padded_rows
from tests.unit.consumer.conftest import make_model

GROUP = cast("Any", object())  # stands where a process group would; cutting out needs none


def describe(model_type: str = "qwen3", *, tp_size: int = 1, num_stages: int = 1, **settings: object) -> Any:
    layers = {1: [3], 2: [2, 1]}[num_stages]
    model = make_model(model_type, num_hidden_layers=3, **settings)
    return describe_parameters(model, Layout(tp_size=tp_size, num_stages=num_stages), layers)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama", "mistral", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_order_is_the_state_dicts_and_a_tied_head_is_left_out(model_type: str, tied: bool) -> None:
    infos = describe(model_type, tie_word_embeddings=tied)
    state = make_model(model_type, num_hidden_layers=3, tie_word_embeddings=tied).state_dict()
    assert [info.name for info in infos] == [name for name in state if not tied or name != "lm_head.weight"]
    assert all(info.shape == tuple(state[info.name].shape) for info in infos)


def test_each_stage_has_its_layers_the_first_the_embedding_and_the_last_norm_and_head() -> None:
    stages = {info.name: info.stage for info in describe(num_stages=2, tie_word_embeddings=False)}
    assert stages["model.embed_tokens.weight"] == 0
    assert {stages[name] for name in stages if name.startswith(("model.layers.0.", "model.layers.1."))} == {0}
    assert {stages[name] for name in stages if name.startswith("model.layers.2.")} == {1}
    assert stages["model.norm.weight"] == stages["lm_head.weight"] == 1


@pytest.mark.parametrize(
    ("tied", "num_stages", "expected"),
    [(True, 2, {"model.embed_tokens.weight": "lm_head.weight"}), (True, 1, {}), (False, 2, {})],
)
def test_only_a_tied_embedding_has_a_second_name_and_only_on_another_stage(
    tied: bool, num_stages: int, expected: dict[str, str]
) -> None:
    infos = describe(num_stages=num_stages, tie_word_embeddings=tied)
    assert {info.name: info.tied_name for info in infos if info.tied_name} == expected


def test_qwen3_is_cut_by_its_plan_and_its_head_norms_have_partial_gradients() -> None:
    infos = {info.name: info for info in describe(tp_size=2, tie_word_embeddings=False)}
    layer = "model.layers.2."
    rows = [f"self_attn.{name}_proj.weight" for name in "qkv"] + ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    expected = {layer + name: 0 for name in rows} | {"model.embed_tokens.weight": 0, "lm_head.weight": 0}
    expected |= {layer + name: 1 for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight")}
    whole = [f"self_attn.{name}_norm.weight" for name in "qk"]
    whole += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    expected |= dict.fromkeys([layer + name for name in whole] + ["model.norm.weight"])
    of_others = ("model.layers.0.", "model.layers.1.")
    assert {n: info.split_dim for n, info in infos.items() if not n.startswith(of_others)} == expected
    partial = {f"model.layers.{i}.self_attn.{name}_norm.weight" for i in range(3) for name in "qk"}
    assert {name for name, info in infos.items() if info.is_partial} == partial


def test_a_bias_is_cut_with_its_rows_and_whole_beside_cut_columns() -> None:
    infos = {info.name: info for info in describe("llama", tp_size=2, attention_bias=True, mlp_bias=True)}
    split_dims = {
        name.removeprefix("model.layers.0."): info.split_dim
        for name, info in infos.items()
        if name.endswith(".bias") and ".0." in name
    }
    assert split_dims == {
        "self_attn.q_proj.bias": 0,
        "self_attn.k_proj.bias": 0,
        "self_attn.v_proj.bias": 0,
        "self_attn.o_proj.bias": None,
        "mlp.gate_proj.bias": 0,
        "mlp.up_proj.bias": 0,
        "mlp.down_proj.bias": None,
    }
    assert not any(info.is_partial for info in infos.values())


def test_without_tensor_parallelism_nothing_is_cut_and_no_plan_is_asked_for() -> None:
    infos = describe("gpt2")
    assert {info.split_dim for info in infos} == {None}
    with pytest.raises(ConfigError, match="the architecture gpt2 declares no tensor-parallel plan"):
        describe("gpt2", tp_size=2)


def test_an_embedding_that_does_more_than_look_up_is_not_cut() -> None:
    describe("gemma")
    with pytest.raises(ConfigError, match=r"GemmaForCausalLM embeds its tokens by Gemma.*; use -tp 1"):
        describe("gemma", tp_size=2)


class Held:
    """Stands where a rank's model would."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self._parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        return self._parameters


ROWS = ParameterInfo(name="rows", shape=(4, 6), stage=0, split_dim=0)
COLUMNS = ParameterInfo(name="columns", shape=(4, 6), stage=0, split_dim=1)
WHOLE = ParameterInfo(name="whole", shape=(5,), stage=0)


def local(layout: Layout, *infos: ParameterInfo) -> LocalParameters:
    return LocalParameters(cast("Any", Held(**{info.name: info.shape for info in infos})), infos, layout)


def shards(full: Tensor, info: ParameterInfo, tp_size: int) -> list[Tensor]:
    layouts = [Layout(tp_rank=rank, tp_size=tp_size, tp_group=GROUP) for rank in range(tp_size)]
    return [local(layout, info).shard(info.name, full) for layout in layouts]


def test_shards_are_equal_parts_in_the_order_of_ranks() -> None:
    full = torch.arange(24.0).view(4, 6)
    assert [shard.tolist() for shard in shards(full, ROWS, 2)] == [full[:2].tolist(), full[2:].tolist()]
    assert [shard.tolist() for shard in shards(full, COLUMNS, 3)] == [
        [[0, 1], [6, 7], [12, 13], [18, 19]],
        [[2, 3], [8, 9], [14, 15], [20, 21]],
        [[4, 5], [10, 11], [16, 17], [22, 23]],
    ]
    assert all(torch.equal(shard, full) for shard in shards(full, WHOLE, 2))


def test_slices_are_runs_of_elements_and_the_last_is_padded_with_zeros() -> None:
    shard = torch.arange(1.0, 6.0)
    layouts = [Layout(dp_rank=rank, dp_size=3, zero_stage=1) for rank in range(3)]
    slices = [local(layout, WHOLE).slice_of_shard(shard) for layout in layouts]
    assert [part.tolist() for part in slices] == [[1, 2], [3, 4], [5, 0]]


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_size=3)], ids=["one copy", "three"])
def test_a_copy_that_shares_nothing_out_has_all_of_a_shard(layout: Layout) -> None:
    shard = torch.arange(6.0).view(2, 3)
    parameters = local(layout, WHOLE)
    assert parameters.slice_of_shard(shard) is shard
    assert parameters.shard_of_slices("whole", shard) is shard
    assert parameters.full("whole", shard) is shard


def test_padded_rows_keep_the_order_of_elements() -> None:
    assert padded_rows(torch.arange(1.0, 7.0).view(2, 3), 2).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert padded_rows(torch.arange(1.0, 6.0), 4).tolist() == [[1, 2], [3, 4], [5, 0], [0, 0]]
    assert padded_rows(torch.tensor(7.0), 2).tolist() == [[7], [0]]


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_every_number_of_a_gradient_counts_in_the_norm_once(zero_stage: int) -> None:
    tied = ParameterInfo(name="tied", shape=(4, 6), stage=0, split_dim=0, tied_name="head")
    last = ParameterInfo(name="last", shape=(5,), stage=1)
    infos = (tied, ROWS, COLUMNS, WHOLE, last)
    held = [("tied", "rows", "columns", "whole"), ("head", "last")]  # by the stages; both have the tied one
    counted = dict.fromkeys((info.name for info in infos), 0)
    for rank in range(8):
        dp_rank, stage, tp_rank = rank // 4, rank // 2 % 2, rank % 2
        layout = Layout(
            dp_rank=dp_rank, dp_size=2, stage=stage, num_stages=2, tp_rank=tp_rank, tp_size=2, zero_stage=zero_stage
        )
        parameters = LocalParameters(cast("Any", Held(**dict.fromkeys(held[stage], (1,)))), infos, layout)
        assert set(parameters.by_name) == ({"tied", "rows", "columns", "whole"} if stage == 0 else {"tied", "last"})
        for name in parameters.by_name:
            counted[name] += parameters.counts_in_norm(name)
    # Under ZeRO each copy has another slice.
    copies = 2 if zero_stage else 1
    assert counted == {"tied": 2 * copies, "rows": 2 * copies, "columns": 2 * copies, "whole": copies, "last": copies}
