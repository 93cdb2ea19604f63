"""Test what the forecast counts of a trainer of adapters, of sizes that a reader can multiply."""

import pytest
from transformers import LlamaConfig

from coati_rl.config.cli import build_config
from coati_rl.memory.activations import MicroBatchSize
from coati_rl.memory.adapters import NF4_BYTES, adapter_shape
from coati_rl.memory.run_engines import engine_memory
from coati_rl.memory.run_memory import Machine, RunModels, trainer_memory
from coati_rl.memory.updates import shared_update, update_size
from coati_rl.model_files.adapter_files import AdapterSpec
from coati_rl.transport.manifest import DEFAULT_BUCKET_BYTES

H, F, K, LAYERS, V, RANK = 64, 160, 32, 3, 512, 4
MODEL = LlamaConfig(
    hidden_size=H,
    intermediate_size=F,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=V,
    tie_word_embeddings=True,
    dtype="float32",
)
LINEAR = 2 * H * H + 2 * H * K + 3 * H * F  # parameters of a layer's linear layers
BASE = LAYERS * (LINEAR + 2 * H) + V * H + H
ADAPTERS = LAYERS * RANK * (2 * (H + H) + 2 * (H + K) + 3 * (H + F))
SIZE = MicroBatchSize(tokens=256, loss_tokens=128, longest=64)


def memory(models=None, device="cpu", **settings):
    config = build_config({"model": "m", "dataset": "d", "lora_rank": RANK, "num_trainers": 1, **settings})
    machine = Machine(device=device, host_bytes=2**34)
    return trainer_memory(config, models or RunModels(policy=MODEL), SIZE, machine, has_several_micro_batches=True)


def test_what_is_trained_are_two_factors_of_each_linear_layer():
    parts = memory().parts
    assert parts["parameters"] == parts["gradients"] == 4 * ADAPTERS and parts["optimizer"] == 8 * ADAPTERS


def test_in_bfloat16_adapters_have_masters_and_the_base_has_none():
    parts = memory(precision="bf16").parts
    assert (parts["parameters"], parts["masters"], parts["base"]) == (2 * ADAPTERS, 4 * ADAPTERS, 2 * BASE)


def test_a_base_in_its_files_dtype_is_there_once_for_all_trainers_of_a_host():
    process = memory(num_trainers=2)
    assert process.parts["base"] == 0 and process.shared == {"base": 4 * BASE}
    assert process.host_bytes("cpu") == 2 * sum(process.on_host("cpu").values()) + 4 * BASE
    assert memory(plugin="fsdp2", num_trainers=2).parts["base"] == 4 * BASE // 2


def test_targets_are_counted_by_name():
    some = adapter_shape(MODEL, AdapterSpec(rank=RANK, alpha=1, targets=("k_proj", "down_proj")))
    assert (some.layer_weights, some.layer_adapters) == (RANK * (H + K + F + H), 2)


def test_a_factor_is_cut_as_the_side_of_the_weight_that_it_has():
    whole, cut = (
        adapter_shape(MODEL, AdapterSpec(rank=RANK, alpha=1, targets=("q_proj", "o_proj")), tensor_parallel_size=tp)
        for tp in (1, 2)
    )
    assert whole.layer_weights == RANK * 4 * H
    assert cut.layer_weights == RANK * 3 * H  # half of q_proj's B and of o_proj's A


def test_reference_and_policy_before_the_update_take_a_copy_of_the_adapters_at_most():
    models = RunModels(policy=MODEL, adapter_copies=1)
    assert memory(models).parts["frozen models"] == 4 * ADAPTERS


def test_a_critic_has_adapters_and_a_head():
    critic = memory(RunModels(policy=MODEL, critic=MODEL)).parts["critic"]
    assert critic == 4 * 4 * (ADAPTERS + H)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_base_in_4_bits_has_nine_sixteenths_of_a_byte_for_each_weight_of_a_linear_layer(precision):
    e = {"fp32": 4, "bf16": 2}[precision]
    process = memory(precision=precision, load_in_4bit=True)
    quantized = LAYERS * LINEAR
    assert NF4_BYTES == 9 / 16
    others = 0 if precision == "fp32" else e * (BASE - quantized)  # of files in float32, a map of them
    assert process.parts["base"] == quantized * 9 // 16 + others
    assert process.shared == ({"base": e * (BASE - quantized)} if precision == "fp32" else {})


def test_engines_that_get_adapters_alone_take_and_are_sent_these_in_float32():
    def sent(device, sync, backend):
        settings = {"lora_rank": RANK, "num_trainers": 1, "backend": "vllm", "lora_sync": sync, "precision": "bf16"}
        config = build_config({"model": "m", "dataset": "d", **settings})
        size, machine = update_size(config, MODEL, "bf16"), Machine(device=device, host_bytes=2**34)
        models = RunModels(policy=MODEL)
        trainer = trainer_memory(config, models, SIZE, machine, has_several_micro_batches=True, backend=backend)
        engine = engine_memory(config, MODEL, machine, backend, sequence_tokens=1)
        segments = shared_update(size, "shm")["weights in shared memory"]
        where = trainer.parts if device == "cuda" else trainer.host
        return size.total, segments, engine.shared.get("staging", 0), where["sent weights"] - 2 * DEFAULT_BUCKET_BYTES

    assert sent("cpu", "merged", "gloo") == (2 * BASE, 4 * BASE, 2 * BASE, 2 * V * H)
    assert sent("cpu", "adapter", "gloo") == (4 * ADAPTERS, 8 * ADAPTERS, 4 * ADAPTERS, 4 * RANK * F)
    assert sent("cuda", "adapter", "nccl")[3] == 2 * 4 * RANK * F


@pytest.mark.parametrize(("sync", "num_bytes"), [("merged", 0), ("adapter", 2 * BASE)])
def test_in_turns_a_host_has_the_base_of_engines_on_gpus_that_get_adapters_alone(sync, num_bytes):
    settings = {"lora_rank": RANK, "num_trainers": 2, "backend": "vllm", "lora_sync": sync, "colocate": True}
    config = build_config({"model": "m", "dataset": "d", **settings})
    engine = engine_memory(config, MODEL, Machine(device="cuda", host_bytes=2**34), "shm", sequence_tokens=1)
    assert engine.host.get("offloaded", 0) == num_bytes
