"""Compare the gradient of a packed row on a device with the CPU's, on a tiny model with random weights."""

import copy

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from consumer.models.loading import attention_of, prepare
from consumer.models.policy_model import make_input, policy_forward
from consumer.proofs.layout_trial import weights_of
from consumer.proofs.samples import SamplePart, micro_batch_of

_LENGTHS = (13, 9, 17)  # tokens of the samples in the row
_VOCABULARY, _WIDTH = 128, 64


def gradient_difference(device: str) -> float:
    """Return |gradient - gradient on the CPU| / |gradient on the CPU| over all parameters, in float32."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=_VOCABULARY,
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention_of(config))
    on_cpu, on_device = (_gradient(copy.deepcopy(model), torch.device(each)) for each in ("cpu", device))
    return float((on_device - on_cpu).norm() / on_cpu.norm())


def _gradient(model: PreTrainedModel, device: torch.device) -> Tensor:
    """Return the gradient of a weighted sum of log-probabilities, float32[number of parameters], on the CPU."""
    model = prepare(model.to(device), gradient_checkpointing=False)
    tokens = torch.randint(0, _VOCABULARY, (sum(_LENGTHS),), generator=torch.Generator().manual_seed(1)).split(_LENGTHS)
    batch, _ = micro_batch_of([[SamplePart(token_ids=tuple(each.tolist())) for each in tokens]])
    logprobs, _ = policy_forward(model, make_input(batch, device=device))
    (logprobs * weights_of(logprobs.shape[-1]).to(device)).sum().backward()
    return torch.cat([each.grad.flatten().cpu() for each in model.parameters() if each.grad is not None])
