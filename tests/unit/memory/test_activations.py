"""Test what autograd is forecast to keep, against the tensors that real layers keep."""

import itertools

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, AutoModelForCausalLM

from coati_rl.memory.activations import (
    MicroBatchSize,
    backward_bytes,
    chunk_rows,
    head_bytes,
    kept_bytes,
    layer_bytes,
)
from coati_rl.memory.adapters import adapter_shape
from coati_rl.memory.model_shape import model_shape
from coati_rl.model_files.adapter_files import AdapterSpec
from coati_rl.ops.fused_loss import fused_token_loss
from consumer.adapters.adapters import Adapters, AdapterSource
from consumer.models.loading import convert, prepare
from consumer.models.packed_attention import NAME
from consumer.parallel.layout import Layout
from consumer.parallel.parameters import describe_parameters

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
PROMPT, RESPONSE = 24, 20
SHARED = (PROMPT, RESPONSE, RESPONSE)  # a prompt and two responses behind it


def kept_by_autograd(config, dtype, *, lengths, parents=None, is_recomputed=False, adapters=None):
    """Bytes of the tensors that a forward up to the last norm keeps, and its output; weights, ids, rotations apart."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)
    prepare(model, gradient_checkpointing=is_recomputed)
    if adapters is not None:
        infos = describe_parameters(model, Layout(), [config.num_hidden_layers])
        Adapters(model, infos, AdapterSource(spec=adapters, base="")).attach(model, Layout())
        convert(model)
    others = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    kept, alive = {}, []

    def keep(tensor):
        storage = tensor.untyped_storage()
        is_rotation = tensor.shape[-2:] == (sum(lengths), config.head_dim) and tensor.grad_fn is None
        if storage.data_ptr() not in others and tensor.is_floating_point() and not is_rotation:
            kept[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    ids = torch.randint(0, config.vocab_size, (1, sum(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.base_model(
            input_ids=ids, position_ids=positions, use_cache=False, lengths=(lengths,), parents=parents
        ).last_hidden_state
    return sum(kept.values()) + output.untyped_storage().nbytes()


def one_in(every, cases):
    """The others are of --all."""
    return [pytest.param(*case, marks=[pytest.mark.full] * (number % every > 0)) for number, case in enumerate(cases)]


@pytest.mark.parametrize(
    ("model_type", "precision"), one_in(3, itertools.product(["qwen3", "qwen2", "llama", "mistral"], ["fp32", "bf16"]))
)
def test_kept_bytes_are_those_of_real_layers(model_type, precision):
    config = AutoConfig.for_model(model_type, **SIZES, sliding_window=None)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    size = MicroBatchSize(tokens=80, loss_tokens=60, longest=50)
    found = kept_bytes(model_shape(config), size, precision, "cpu", layers=3, is_recomputed=False)
    assert found == kept_by_autograd(config, dtype, lengths=(50, 30))


TARGETS = [("all-linear",), ("q_proj", "k_proj"), ("o_proj", "up_proj", "q_proj", "k_proj")]
ADAPTED = itertools.product([("qwen3", "fp32"), ("llama", "bf16"), ("qwen2", "bf16")], TARGETS, [False, True])


@pytest.mark.parametrize(("model", "targets", "is_recomputed"), one_in(5, ADAPTED))
def test_with_adapters_kept_bytes_are_those_of_real_layers(model, targets, is_recomputed):
    model_type, precision = model
    config = AutoConfig.for_model(model_type, **SIZES, sliding_window=None)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    size = MicroBatchSize(tokens=80, loss_tokens=60, longest=50)
    spec = AdapterSpec(rank=8, alpha=8.0, targets=targets)
    adapters = adapter_shape(config, spec)

    def forecast(layers):
        return kept_bytes(
            model_shape(config), size, precision, "cpu", layers=layers, is_recomputed=is_recomputed, adapters=adapters
        )

    found = kept_by_autograd(config, dtype, lengths=(50, 30), is_recomputed=is_recomputed, adapters=spec)
    one_at_a_time = layer_bytes(model_shape(config), size, precision, "cpu", adapters) if is_recomputed else 0
    assert forecast(3) - one_at_a_time == found


ROUTED = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXPERTS = {
    "qwen3_moe": {**ROUTED, "norm_topk_prob": True},
    "qwen2_moe": {**ROUTED, "shared_expert_intermediate_size": 40},
    "mixtral": {"num_local_experts": 6},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2, "eos_token_id": 0},
}


CASES = list(itertools.product(EXPERTS, ("fp32", "bf16"), (False, True)))


@pytest.mark.parametrize(("model_type", "precision", "has_adapters"), one_in(5, CASES))
def test_kept_bytes_of_experts_are_those_of_real_layers_and_some_numbers_a_token(model_type, precision, has_adapters):
    """How many weights of routers are kept in which precision depends on the architecture."""
    config = AutoConfig.for_model(model_type, **{**SIZES, **EXPERTS[model_type]}, sliding_window=None)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    size = MicroBatchSize(tokens=80, loss_tokens=60, longest=50)
    spec = AdapterSpec(rank=8, alpha=8.0, targets=("all-linear",)) if has_adapters else None
    adapters = None if spec is None else adapter_shape(config, spec)
    found = kept_by_autograd(config, dtype, lengths=(50, 30), adapters=spec)
    forecast = kept_bytes(model_shape(config), size, precision, "cpu", layers=3, is_recomputed=False, adapters=adapters)
    assert 0 <= forecast - found <= 80 * 3 * 4 * 8


def test_keys_and_values_of_a_shared_prompt_are_copied_for_each_response():
    config = AutoConfig.for_model("llama", **SIZES)
    lengths = (PROMPT, RESPONSE, RESPONSE)
    alone = kept_by_autograd(config, torch.float32, lengths=lengths)
    shared = kept_by_autograd(config, torch.float32, lengths=lengths, parents=((-1, 0, 0),))
    masked = RESPONSE * (PROMPT + RESPONSE)
    size = MicroBatchSize(
        tokens=64, loss_tokens=40, path_tokens=2 * (PROMPT + RESPONSE), masked=masked, longest=PROMPT + RESPONSE
    )
    masks = 4 * masked  # float32[T, P + T], the same in all layers
    assert kept_bytes(model_shape(config), size, "fp32", "cpu", layers=3, is_recomputed=False) == shared
    assert shared - masks - alone == 3 * 2 * (PROMPT + RESPONSE) * 2 * 32 * 4


def test_a_recomputed_layer_keeps_its_input_and_one_is_computed_at_a_time():
    config = AutoConfig.for_model("qwen3", **SIZES)
    size = MicroBatchSize(tokens=80, loss_tokens=60, longest=50)
    shape = model_shape(config)
    inputs = kept_by_autograd(config, torch.float32, lengths=(50, 30), is_recomputed=True)
    one = kept_bytes(shape, size, "fp32", "cpu", layers=1, is_recomputed=False)
    none = kept_bytes(shape, size, "fp32", "cpu", layers=0, is_recomputed=False)
    assert kept_bytes(shape, size, "fp32", "cpu", layers=3, is_recomputed=True) == inputs + one - none


def test_logits_exist_for_a_chunk_of_tokens_at_a_time():
    assert chunk_rows(151_936, 2000, "cpu") == 96  # 2^24 // 151,936 = 110, rounded down to a multiple of 16
    assert chunk_rows(151_936, 50, "cpu") == 50
    shape = model_shape(AutoConfig.for_model("llama", **SIZES))
    few, more = (
        head_bytes(shape, MicroBatchSize(tokens=80, loss_tokens=n, longest=50), "fp32", "cpu") for n in (10, 20)
    )
    assert more - few == 10 * 4 * (96 + 2 * 64)  # a token's logits, its hidden state and that one's gradient


class NegativeLogprobs:
    is_token_separable = True

    def __call__(self, logprobs, entropy, arrays):
        return -logprobs.sum(), {}


@pytest.fixture
def whole_chunks(monkeypatch):
    """Have the CPU take the temporaries of a chunk whole, as a GPU does."""
    monkeypatch.setattr("coati_rl.ops.vocab_chunks.BLOCK_ELEMENTS", 2**30)
    monkeypatch.setattr("coati_rl.ops.cpu_products.PRODUCT_BLOCK", 2**20)


@pytest.mark.parametrize("hidden_size", [32, 512])  # the softmax takes most in bf16, or the product of V H
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu_the_heads_memory_is_what_the_loss_allocates(whole_chunks, precision, hidden_size):
    dtype, n, vocabulary = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision], 128, 1000
    sizes = {**SIZES, "vocab_size": vocabulary, "hidden_size": hidden_size}
    shape = model_shape(AutoConfig.for_model("llama", **sizes))
    hidden = torch.randn(1, n, hidden_size, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, dtype=dtype, requires_grad=True)
    token_ids, ones = torch.randint(0, vocabulary, (1, n)), torch.ones(1, n)
    arrays = {"token_ids": token_ids, "sources": torch.arange(n)[None], "loss_mask": ones.bool(), "temperature": ones}
    tracker = MemTracker()
    with tracker:
        fused_token_loss(hidden, weight, None, arrays, NegativeLogprobs())
    (peak,) = (device["Total"] for device in tracker.get_tracker_snapshot("peak").values())
    allocated = peak - hidden.nbytes - weight.nbytes
    size = MicroBatchSize(tokens=n, loss_tokens=n, longest=n)
    forecast = 4 * vocabulary * hidden_size + head_bytes(shape, size, precision, "cuda")
    assert forecast == pytest.approx(allocated, rel=0.02)  # besides, numbers of each token


def test_a_backward_holds_gradients_of_the_mlp_and_of_the_residual_stream():
    shape = model_shape(AutoConfig.for_model("llama", **SIZES))
    size = MicroBatchSize(tokens=80, loss_tokens=60, longest=50)
    assert backward_bytes(shape, size, "bf16") == 80 * 2 * (2 * 160 + 2 * 64)
