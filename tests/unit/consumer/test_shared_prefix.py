"""Test that samples which share prefixes have the gradients of plain transformers, one sample at a time."""

import functools
import statistics
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from coati_rl.batch import MicroBatch
from coati_rl.batching.packing import pack
from coati_rl.samples import Sample
from consumer.models import packed_attention
from consumer.models.loading import prepare
from consumer.models.policy_model import make_input, policy_forward
from tests.unit.consumer.conftest import make_model

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "initializer_range": 0.1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window of half a prompt": ("mistral", {"sliding_window": 24, "tie_word_embeddings": True}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, window in a layer": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
}
CHECKPOINTED = ["mistral, window of half a prompt", "qwen3, tied"]


def make(name: str) -> PreTrainedModel:
    """Random weights of some size, biases and norms too."""
    model_type, settings = MODELS[name]
    model = make_model(model_type, **{**SIZES, **settings})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1 * (parameter.dim() == 1)
    return model


def make_samples() -> list[Sample]:
    """A prompt with responses of 32 tokens to one, a copy and a fork of the first; another with two; random weights."""
    rng = np.random.default_rng(0)
    first, second, *responses = (rng.integers(3, 64, n) for n in (50, 30, 32, 17, 1, 25, 9, 12, 12))
    fork = np.concatenate([responses[0][:13], rng.integers(3, 64, 6)])
    group = [*responses[:5], responses[0], fork, responses[0][:13]]
    texts = [("a", first, response) for response in group] + [("b", second, each) for each in responses[5:]]
    return [
        Sample(
            uid=uid,
            number=number,
            prefix_ids=prompt,
            token_ids=response,
            loss_mask=np.ones(len(response), dtype=bool),
            arrays={
                "temperature": 1.0,
                "loss_weights": (rng.normal(size=len(response)) * (rng.random(len(response)) > 0.2)).astype(np.float32),
            },
        )
        for number, (uid, prompt, response) in enumerate(texts)
    ]


SAMPLES = make_samples()


def gradients_of(model: PreTrainedModel) -> dict[str, Tensor]:
    gradients = {name: p.grad.float() for name, p in model.named_parameters()}
    model.zero_grad()
    return gradients


@functools.cache
def plain(name: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Each sample's log-probabilities, and the gradient of their weighted sum."""
    model, logprobs = make(name), []
    model.set_attn_implementation("eager")
    for sample in SAMPLES:
        ids = torch.tensor(np.concatenate([sample.prefix_ids, sample.token_ids]))
        logits = model(ids[None], use_cache=False).logits[0, len(sample.prefix_ids) - 1 : -1]
        own = -F.cross_entropy(logits, ids[len(sample.prefix_ids) :], reduction="none")
        (torch.tensor(sample.arrays["loss_weights"]) * own).sum().backward()
        logprobs.append(own.detach())
    return logprobs, gradients_of(model)


def trained(model: PreTrainedModel, micro_batches: tuple[MicroBatch, ...]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same in micro-batches."""
    model.set_attn_implementation(packed_attention.NAME)
    logprobs = [torch.zeros(sample.num_loss_tokens) for sample in SAMPLES]
    for micro_batch in micro_batches:
        found, _ = policy_forward(model, make_input(micro_batch, device=torch.device("cpu")))
        (torch.tensor(micro_batch.loss_arrays["loss_weights"]) * found).sum().backward()
        of_sample = torch.tensor(micro_batch.loss_arrays["sample_index"])
        for index in of_sample.unique().tolist():
            logprobs[index] = found.detach()[of_sample == index]
    return logprobs, gradients_of(model)


def errors(found: dict[str, Tensor], right: dict[str, Tensor]) -> list[float]:
    return [float((found[name] - right[name]).norm() / right[name].norm()) for name in right]


def gradient_error(name: str, model: PreTrainedModel, **limits: Any) -> float:
    """The largest relative error of a parameter's gradient; log-probabilities are compared too."""
    (micro_batches,) = pack(SAMPLES, shares_prefixes=True, max_samples=len(SAMPLES), **limits)
    logprobs, gradients = trained(model, micro_batches)
    right_logprobs, right = plain(name)
    torch.testing.assert_close(logprobs, right_logprobs, rtol=0, atol=1e-5)
    return max(errors(gradients, right))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_and_gradients_are_those_of_each_sample_alone(name: str) -> None:
    assert gradient_error(name, make(name)) < 1e-5


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_recomputed_activations_attend_to_shared_prefixes_too(name: str) -> None:
    assert gradient_error(name, prepare(make(name), gradient_checkpointing=True)) < 1e-5


def test_a_group_that_is_cut_has_the_same_gradient() -> None:
    assert gradient_error("qwen3, tied", make("qwen3, tied"), max_tokens=120) < 1e-5


def test_the_prompts_are_computed_once() -> None:
    """Of samples of 632 tokens: 50 + 32 + 17 + 1 + 25 + 9 + 6 and 30 + 12 + 12."""
    ((row,),) = pack(SAMPLES, shares_prefixes=True, max_samples=len(SAMPLES))
    assert (row.num_tokens, sum(map(len, SAMPLES))) == (140 + 54, 632)


def test_bfloat16_is_no_less_exact_with_a_shared_prefix() -> None:
    name = "qwen3, tied"
    medians = {}
    for shares_prefixes in (True, False):
        (micro_batches,) = pack(SAMPLES, shares_prefixes=shares_prefixes, max_samples=len(SAMPLES))
        _, gradients = trained(make(name).to(torch.bfloat16), micro_batches)
        medians[shares_prefixes] = statistics.median(errors(gradients, plain(name)[1]))
    assert medians[True] < 1.1 * medians[False]


def test_a_model_with_masks_of_its_own_is_refused_rather_than_wrong() -> None:
    (micro_batches,) = pack(SAMPLES, shares_prefixes=True, max_samples=len(SAMPLES))
    model = make_model("olmo2", vocab_size=64)
    with pytest.raises(ValueError, match="the attention of Olmo2ForCausalLM cannot share prefixes"):
        policy_forward(model, make_input(micro_batches[0], device=torch.device("cpu")))


def kept_bytes(model: PreTrainedModel, samples: list[Sample], *, shares_prefixes: bool = True) -> int:
    """What a forward of one row keeps for the backward pass beside the weights."""
    ((row,),) = pack(samples, shares_prefixes=shares_prefixes, max_samples=len(samples))
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used again

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy_forward(model, make_input(row, device=torch.device("cpu")))
    return sum(storage.nbytes() for storage in kept.values())


def group_of(num_prompt: int, num_responses: int, length: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    prompt, responses = rng.integers(3, 64, num_prompt), rng.integers(3, 64, (num_responses, length))
    return [
        Sample(
            uid="a",
            number=number,
            prefix_ids=prompt,
            token_ids=response,
            loss_mask=np.ones(length, dtype=bool),
            arrays={"temperature": 1.0},
        )
        for number, response in enumerate(responses)
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("response", [8, 40])
def test_keys_and_values_of_each_path_come_on_top_of_the_tokens_that_are_counted(response: int) -> None:
    """Models that differ in their key and value heads alone tell these from the rest."""
    prompt, number, on_top = 400, 8, dict[int, int]()
    group, counted = group_of(prompt, number, response), prompt + number * response
    for heads in (2, 4):
        model = make_model("llama", **{**SIZES, "num_key_value_heads": heads})
        model.set_attn_implementation(packed_attention.NAME)
        shared, alone = (kept_bytes(model, group, shares_prefixes=shares) for shares in (True, False))
        assert shared < alone / 3, "with a long prompt"
        on_top[heads] = shared - kept_bytes(model, group_of(counted - 1, 1, 1))
    two_heads = 2 * model.config.num_hidden_layers * 2 * SIZES["head_dim"] * 4  # bytes of a token's keys and values
    assert on_top[4] - on_top[2] == pytest.approx(number * (prompt + response) * two_heads, rel=1e-3)
