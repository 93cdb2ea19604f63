"""Test what autograd is forecast to keep, against the tensors that real layers keep."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from coati_rl.memory.activations import MicroBatchSize, backward_bytes, chunk_rows, head_bytes, kept_bytes
from coati_rl.memory.model_shape import model_shape
from consumer.models.loading import prepare
from consumer.models.packed_attention import NAME

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


def kept_by_autograd(config, dtype, *, lengths, parents=None, is_recomputed=False):
    """Bytes of the tensors that a forward up to the last norm keeps, and its output; weights, ids, rotations apart."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)
    prepare(model, gradient_checkpointing=is_recomputed)
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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama", "mistral"])
def test_kept_bytes_are_those_of_real_layers(model_type, precision):
    config = AutoConfig.for_model(model_type, **SIZES, sliding_window=None)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    size = MicroBatchSize(tokens=80, loss_tokens=60, longest=50)
    found = kept_bytes(model_shape(config), size, precision, "cpu", layers=3, is_recomputed=False)
    assert found == kept_by_autograd(config, dtype, lengths=(50, 30))


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


def test_a_backward_holds_gradients_of_the_mlp_and_of_the_residual_stream():
    shape = model_shape(AutoConfig.for_model("llama", **SIZES))
    size = MicroBatchSize(tokens=80, loss_tokens=60, longest=50)
    assert backward_bytes(shape, size, "bf16") == 80 * 2 * (2 * 160 + 2 * 64)
