"""Test the sums of a trainer's and an engine's parts, of sizes that a reader can multiply."""

from dataclasses import replace

import pytest

from coati_rl.memory.activations import MicroBatchSize, head_bytes, kept_bytes, layer_bytes
from coati_rl.memory.engine import (
    EngineSettings,
    cpu_cache_bytes,
    cpu_engine_parts,
    gpu_engine_parts,
    transformers_engine_parts,
)
from coati_rl.memory.forecast import Forecast, ProcessMemory, gib
from coati_rl.memory.model_shape import ModelShape
from coati_rl.memory.trainer import (
    BUCKET_BYTES,
    FrozenModel,
    TrainerLayout,
    offloaded_bytes,
    trained_bytes,
    trainer_parts,
)
from consumer.parallel.gradient_reduction import BUCKET_ELEMENTS

SHAPE = ModelShape(
    model_type="llama", hidden=8, queries=8, keys=4, intermediate=16, vocabulary=100, num_heads=2, num_layers=10,
    normalizes_heads=False, is_tied=True, layer_weights=1000, embedding_weights=800, head_weights=0,
    other_root_weights=8, largest_tensor=800,
)  # fmt: skip
WEIGHTS = 10 * 1000 + 808
SIZE = MicroBatchSize(tokens=64, loss_tokens=32, longest=64)


class LlamaSizes:
    """What an engine's cache depends on, of a transformers config."""

    model_type = "llama"
    num_hidden_layers, num_key_value_heads, num_attention_heads, head_dim = 10, 2, 4, 16


def test_states_in_float32_are_weights_two_moments_and_gradients():
    parts = trainer_parts(SHAPE, SIZE, TrainerLayout(precision="fp32"))
    assert parts["parameters"] == parts["gradients"] == 4 * WEIGHTS and parts["optimizer"] == 8 * WEIGHTS


def test_states_in_bfloat16_have_masters_which_zero_shards():
    one, sharded = (
        trainer_parts(SHAPE, SIZE, TrainerLayout(precision="bf16", dp=4, zero_stage=stage)) for stage in (0, 1)
    )
    names = ("parameters", "masters", "optimizer")
    assert [one[name] for name in names] == [2 * WEIGHTS, 4 * WEIGHTS, 8 * WEIGHTS]
    assert [sharded[name] for name in names] == [2 * WEIGHTS, WEIGHTS, 2 * WEIGHTS]


def test_fsdp2_shards_weights_moments_and_gradients():
    parts = trainer_parts(SHAPE, SIZE, TrainerLayout(precision="fp32", plugin="fsdp2", dp=4))
    assert parts["parameters"] == parts["gradients"] == WEIGHTS and parts["optimizer"] == 2 * WEIGHTS
    copies = trainer_parts(SHAPE, SIZE, TrainerLayout(precision="fp32", plugin="fsdp2", dp=4, fsdp_copies=2))
    assert copies == parts  # what they sum at a time is smaller than a gathered layer


def test_experts_of_other_ranks_are_not_gathered():
    experts = replace(SHAPE, expert_weights=SHAPE.layer_weights // 2)
    one, two = (
        trainer_parts(experts, SIZE, TrainerLayout(precision="fp32", plugin="fsdp2", dp=4, ep=ep)) for ep in (1, 2)
    )
    assert one["gathered"] - two["gathered"] in (3 * 4 * SHAPE.layer_weights // 4, 0)
    assert one["parameters"] == two["parameters"]


@pytest.mark.parametrize(
    ("layout", "away"),
    [
        (TrainerLayout(precision="fp32"), 8 * WEIGHTS),  # two moments
        (TrainerLayout(precision="bf16"), 12 * WEIGHTS),  # and masters
        (TrainerLayout(precision="bf16", dp=4, zero_stage=1), 3 * WEIGHTS),
        (TrainerLayout(precision="bf16", plugin="fsdp2", dp=4), 2 * WEIGHTS),  # whose masters are the parameters
    ],
)
def test_an_offloaded_optimizer_is_not_there_while_activations_are(layout, away):
    offloaded = replace(layout, offloads_optimizer=True)
    assert offloaded_bytes(SHAPE, SIZE, layout) == 0
    assert offloaded_bytes(SHAPE, SIZE, offloaded) == away
    assert trained_bytes(SHAPE, SIZE, layout) - trained_bytes(SHAPE, SIZE, offloaded) == away
    many, names = MicroBatchSize(tokens=8192, loss_tokens=8192, longest=64), ("masters", "optimizer")
    plain, in_forward = (trainer_parts(SHAPE, many, each) for each in (layout, offloaded))
    assert sum(in_forward.get(name, 0) for name in names) == 0 and in_forward["activations"] > away
    assert {**in_forward, **{name: plain[name] for name in names if name in plain}} == plain


def test_an_offloaded_optimizer_is_there_in_its_step():
    few = MicroBatchSize(tokens=1, loss_tokens=1, longest=1)
    in_step = trainer_parts(SHAPE, few, TrainerLayout(precision="bf16", offloads_optimizer=True))
    expected = {"parameters": 2 * WEIGHTS, "masters": 4 * WEIGHTS, "optimizer": 8 * WEIGHTS, "gradients": 4 * WEIGHTS}
    assert {name: size for name, size in in_step.items() if name != "heap"} == expected


def test_a_model_that_scores_alone_counts_where_it_is_more_than_a_step():
    models = [FrozenModel(shape=SHAPE, num_bytes=n, is_away=True) for n in (1, 10**9)]
    small, large = (trainer_parts(SHAPE, SIZE, TrainerLayout(precision="fp32"), scored=[each]) for each in models)
    assert small == trainer_parts(SHAPE, SIZE, TrainerLayout(precision="fp32"))
    assert large["frozen models"] == 10**9 and large["parameters"] == 4 * WEIGHTS and "backward" not in large


@pytest.mark.parametrize(
    ("layout", "gathered"),
    [
        (TrainerLayout(precision="bf16", plugin="fsdp2", dp=8), 2 * (4_000_000 + 3 * 500_000)),
        (TrainerLayout(precision="bf16", dp=8), 0),
    ],
)
def test_a_larger_model_that_scores_takes_its_own_layers_activations_and_what_fsdp2_gathers_of_it(layout, gathered):
    teacher = replace(
        SHAPE, hidden=400, queries=400, intermediate=4000, layer_weights=500_000, embedding_weights=4_000_000 - 8
    )
    parts = trainer_parts(SHAPE, SIZE, layout, scored=[FrozenModel(shape=teacher, num_bytes=10**7)])
    assert parts["activations"] == layer_bytes(teacher, SIZE, "bf16", "cpu")
    assert parts["gathered"] == gathered
    assert "frozen models" not in parts, "it is always there"
    own = FrozenModel(shape=SHAPE, num_bytes=10**7)
    assert trainer_parts(SHAPE, SIZE, layout, scored=[own]) == trainer_parts(SHAPE, SIZE, layout)


def test_recomputed_activations_take_less_and_grow_with_tokens():
    def total(tokens, **settings):
        size = MicroBatchSize(tokens=tokens, loss_tokens=tokens, longest=tokens)
        return sum(trainer_parts(SHAPE, size, TrainerLayout(precision="fp32", **settings)).values())

    assert total(64) < total(128) < total(256)
    assert total(256, gradient_checkpointing=True) < total(256)


def test_offloaded_activations_are_two_layers_inputs_on_the_device_and_all_in_host_memory():
    size = MicroBatchSize(tokens=4096, loss_tokens=1, longest=4096)
    layout = TrainerLayout(precision="bf16", device="cuda", gradient_checkpointing=True)
    offloaded = replace(layout, offloads_activations=True)
    one = 4096 * 2 * 8  # bytes of a layer's input
    plain, less = (trainer_parts(SHAPE, size, each)["activations"] for each in (layout, offloaded))
    assert plain - less == (10 - 2) * one
    assert offloaded_bytes(SHAPE, size, offloaded) == 10 * one
    assert offloaded_bytes(SHAPE, size, replace(offloaded, offloads_optimizer=True)) == 10 * one + 12 * WEIGHTS


@pytest.mark.parametrize(("several", "in_flight"), [(True, 4), (False, 1)])
def test_the_first_of_four_stages_keeps_four_micro_batches_and_no_logits(several, in_flight):
    size = MicroBatchSize(tokens=4096, loss_tokens=1, longest=4096)
    layout = TrainerLayout(precision="fp32", pp=4, has_several_micro_batches=several, device="cuda")
    parts = trainer_parts(SHAPE, size, layout)
    # 10 layers on 4 stages: 3 at most.
    assert parts["activations"] == in_flight * kept_bytes(SHAPE, size, "fp32", "cuda", layers=3, is_recomputed=False)
    assert ("LM head" in parts) != ("backward" in parts)


def test_a_product_for_the_heads_gradient_in_bfloat16_has_2048_rows_on_the_cpu_and_all_on_a_gpu():
    size = MicroBatchSize(tokens=1, loss_tokens=1, longest=1)
    shape = replace(SHAPE, vocabulary=10_000)
    rest = 6 * 10_000 + 2 * 2 * 8  # logits of a token in both precisions; its hidden state and gradient
    assert head_bytes(shape, size, "bf16", "cpu") == rest + 6 * 2048 * 8
    assert head_bytes(shape, size, "bf16", "cuda") == rest + 2 * 10_000 * 8
    wide = MicroBatchSize(tokens=64, loss_tokens=64, longest=64)  # the logits' exponentials take more than a product
    assert head_bytes(shape, wide, "bf16", "cuda") == 64 * (8 * 10_000 + 2 * 2 * 8)


def test_a_step_of_one_micro_batch_holds_gradients_only_as_activations_go():
    one, several = (
        sum(
            trainer_parts(
                SHAPE,
                MicroBatchSize(tokens=512, loss_tokens=512, longest=512),
                TrainerLayout(precision="fp32", has_several_micro_batches=several),
            ).values()
        )
        for several in (False, True)
    )
    assert one < several


@pytest.mark.parametrize(("device", "sums"), [("cpu", 3 * 4 + 1), ("cuda", 2 * 4 + 2 * 1)])
def test_zero_pads_joins_and_on_the_cpu_copies_a_bucket_of_gradients(device, sums):
    size = MicroBatchSize(tokens=1, loss_tokens=1, longest=1)
    layout = TrainerLayout(precision="bf16", dp=4, zero_stage=1, device=device, has_several_micro_batches=False)
    parts = trainer_parts(SHAPE, size, layout)
    assert parts["communication"] == sums * WEIGHTS  # a bucket has all gradients, 4 bytes a weight, a slice 1


def test_the_heap_is_that_of_trainers_on_the_cpu_which_keep_it():
    def has_heap(**settings):
        return "heap" in trainer_parts(SHAPE, SIZE, TrainerLayout(precision="fp32", **settings))

    assert has_heap()
    assert not has_heap(device="cuda")
    assert not has_heap(has_several_micro_batches=False)
    assert not has_heap(plugin="fsdp2", dp=2)


def test_buckets_are_those_of_the_trainers():
    assert BUCKET_BYTES == 4 * BUCKET_ELEMENTS


def settings(**changes):
    values = {
        "precision": "fp32", "tensor_parallel_size": 1, "max_model_len": 872, "max_num_seqs": 100, "block_size": 32,
    }  # fmt: skip
    return EngineSettings(**{**values, **changes})


def test_a_cache_on_the_cpu_holds_all_sequences_within_a_quarter_of_the_memory():
    wanted = 2 * 10 * 2 * 16 * 4 * (872 + 128) * 100
    assert cpu_cache_bytes(LlamaSizes(), settings(), host_bytes=2**40) == wanted
    assert cpu_cache_bytes(LlamaSizes(), settings(), host_bytes=2**29 + 2**28) == 2**27 + 2**26
    assert cpu_cache_bytes(LlamaSizes(), settings(max_num_seqs=1), host_bytes=2**40) == 2**27


def test_an_engine_on_the_cpu_packs_a_tied_head():
    parts = cpu_engine_parts(SHAPE, settings(), cache_bytes=7)
    assert parts == {"parameters": 4 * (WEIGHTS + 800), "KV cache": 7, "logits": 2 * 4 * 100 * 100}


def test_an_engine_on_a_gpu_takes_its_share_and_stages_beside_it():
    parts = gpu_engine_parts(
        SHAPE, settings(precision="bf16"), share_bytes=100_000, update_bytes=500, sequence_bytes=10
    )
    assert parts == {"parameters": 2 * WEIGHTS, "KV cache": 100_000 - 2 * WEIGHTS, "staging": 500}


def test_quantized_weights_are_not_counted():
    whole, quantized = (
        gpu_engine_parts(SHAPE, settings(is_quantized=each), share_bytes=100_000, update_bytes=500, sequence_bytes=10)
        for each in (False, True)
    )
    assert (whole["parameters"], quantized["parameters"]) == (4 * WEIGHTS, 0)
    assert sum(whole.values()) == sum(quantized.values()) == 100_500


def test_plain_transformers_have_the_cache_of_their_sequences():
    parts = transformers_engine_parts(SHAPE, settings(precision="bf16"), cache_bytes=7, update_bytes=1000)
    assert parts == {"parameters": 2 * WEIGHTS, "KV cache": 7, "staging": 1000}


def test_a_forecast_without_a_part_has_the_others():
    trainer = ProcessMemory(name="trainer", count=2, parts={"parameters": 6, "heap": 4}, host={"libraries": 3})
    forecast = Forecast(device="cpu", processes=(trainer,))
    assert (forecast.host_bytes, forecast.without("heap").host_bytes) == (2 * 13, 2 * 9)


@pytest.mark.parametrize(("device", "on_host"), [("cpu", 2 * (10 + 3) + 4 * 5 + 7), ("cuda", 2 * 3 + 7)])
def test_a_host_holds_its_processes_and_on_the_cpu_their_devices_memory(device, on_host):
    trainers = ProcessMemory(name="trainer", count=2, parts={"parameters": 6, "gradients": 4}, host={"libraries": 3})
    engines = ProcessMemory(name="engine rank", count=4, parts={"parameters": 5})
    forecast = Forecast(device=device, processes=(trainers, engines), shared={"weights": 7})
    assert forecast.host_bytes == on_host and forecast.largest is trainers


def test_memory_that_ranks_share_is_there_once_for_all_that_are_together():
    engines = ProcessMemory(
        name="engine rank", count=8, parts={"parameters": 5}, host={"libraries": 3}, shared={"staging": 100}, together=4
    )
    assert engines.host_bytes("cuda") == 8 * 3 + 2 * 100
    assert engines.on_one_host("cuda") == {"libraries": 12, "staging": 100}
    assert engines.host_bytes("cpu") == 8 * (3 + 5) + 2 * 100


def test_lines_name_the_largest_parts_first():
    gibibyte = 2**30
    trainer = ProcessMemory(name="trainer", count=2, parts={"small": 2**20, "large": gibibyte, "none": 0})
    lines = Forecast(device="cpu", processes=(trainer,)).lines()
    assert lines[0] == "memory, trainer         1.0 GiB: large 1.0 GiB, small 1 MiB"
    assert lines[1] == "memory, host            2.0 GiB: 2 x trainer"
    assert gib(gibibyte // 10 - 1) == "102 MiB"
