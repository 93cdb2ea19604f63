"""Provide tiny models, trainer layouts, and functions that start trainer processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.integration.consumer.trainer_server import TrainerServers

VOCAB_SIZE = 96
# AdamW's first step moves every weight by this, in the direction of the gradient's sign. Where a gradient is nearly 0
# the sign is rounding noise, so a large rate would turn 1e-7 in the first gradient into 1e-5 in the second.
LEARNING_RATE = 1e-4
MAX_GRAD_NORM = 0.05  # below the norms that occur, so that clipping takes part
WEIGHT_DECAY = 0.5  # large enough to be seen in an update
NUM_STEPS = 2
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # processes, and what the backend is told
    "dp1": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tp_size": 2}),
    "pp2": (2, {"pp_size": 2}),
    "tp2_pp2": (4, {"tp_size": 2, "pp_size": 2}),
    "zero1_dp2": (2, {"zero_stage": 1}),
    "zero2_dp2": (2, {"zero_stage": 2}),
    "tp2_zero1_dp2": (4, {"tp_size": 2, "zero_stage": 1}),
    # What else can be combined of these.
    "pp2_zero1_dp2": (4, {"pp_size": 2, "zero_stage": 1}),
    "zero1_dp1": (1, {"zero_stage": 1}),
    "tp2_zero2_dp2": (4, {"tp_size": 2, "zero_stage": 2}),
    "pp2_dp2": (4, {"pp_size": 2}),
    "fsdp2_dp2": (2, {"plugin": "fsdp2"}),
}
# Ranks that share each row's tokens.
CONTEXT: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2": (2, {"cp_size": 2}),
    "cp3": (3, {"cp_size": 3}),
    "cp4": (4, {"cp_size": 4}),
    "cp2_dp2": (4, {"cp_size": 2}),
    "cp2_fsdp2": (2, {"cp_size": 2, "plugin": "fsdp2"}),
    "cp2_fsdp2_dp2": (4, {"cp_size": 2, "plugin": "fsdp2"}),
    "cp2_tp2": (4, {"cp_size": 2, "tp_size": 2}),
    "cp2_pp2": (4, {"cp_size": 2, "pp_size": 2}),
    "cp2_zero1": (2, {"cp_size": 2, "zero_stage": 1}),
    "cp2_zero2_dp2": (4, {"cp_size": 2, "zero_stage": 2}),
}
# Three ranks cannot share the rows of a matrix out equally.
UNEVEN: dict[str, tuple[int, dict[str, Any]]] = {"fsdp2_dp3": (3, {"plugin": "fsdp2"})}
# FSDP2 over tensor-parallel ranks' shards, and over some of the data-parallel ranks.
FULLY_SHARDED: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2_tp2": (2, {"plugin": "fsdp2", "tp_size": 2}),
    "fsdp2_copies2": (2, {"plugin": "fsdp2", "fsdp_size": 1}),
    "fsdp2_tp2_dp2": (4, {"plugin": "fsdp2", "tp_size": 2}),
    "fsdp2_tp2_copies2": (4, {"plugin": "fsdp2", "tp_size": 2, "fsdp_size": 1}),
    "fsdp2_dp2_copies2": (4, {"plugin": "fsdp2", "fsdp_size": 2}),
    "cp2_fsdp2_tp2": (4, {"plugin": "fsdp2", "tp_size": 2, "cp_size": 2}),
    "cp2_fsdp2_dp2_copies2": (4, {"plugin": "fsdp2", "cp_size": 2, "fsdp_size": 2}),
}
# The experts of each layer, shared out over ranks with other samples.
EXPERT_PARALLEL: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"plugin": "fsdp2", "ep_size": 2}),
    "ep2_dp2": (4, {"plugin": "fsdp2", "ep_size": 2}),
    "ep2_copies2": (4, {"plugin": "fsdp2", "ep_size": 2, "fsdp_size": 2}),
    "cp2_ep2": (2, {"plugin": "fsdp2", "ep_size": 2, "cp_size": 2}),
}
EVERY_LAYOUT = LAYOUTS | UNEVEN | CONTEXT | FULLY_SHARDED | EXPERT_PARALLEL
CONFIGS: dict[str, Any] = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2_moe": Qwen2MoeConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "mixtral": MixtralConfig,
    "olmoe": OlmoeConfig,
    "deepseek_v2": DeepseekV2Config,
}


def save_model(directory: Path, architecture: str = "qwen3", *, tied: bool, seed: int = 0, **settings: object) -> Path:
    """A tiny model whose random weights bfloat16 can hold, so that both precisions start from the same."""
    torch.manual_seed(seed)
    config = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32 if architecture == "qwen3" else 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
    }
    model = AutoModelForCausalLM.from_config(CONFIGS[architecture](**{**config, **settings}))
    for name, parameter in model.named_parameters():
        if "q_proj.weight" in name or "k_proj.weight" in name:
            parameter.data *= 4  # so that attention prefers some tokens, as in a trained model
    model.bfloat16().float().save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def save_with_reference(directory: Path, architecture: str = "qwen3", **settings: Any) -> Path:
    """A model, and another one of its kind as its reference."""
    save_model(directory, architecture, **settings)
    save_model(reference_of(directory), architecture, **settings, seed=1)
    return directory


def decay_groups(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Parameter groups for AdamW: of these models norms and biases are the vectors, and do not decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def reference_of(model_dir: Path) -> Path:
    return model_dir / "reference"


@pytest.fixture(scope="session")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerServers]:
    servers = TrainerServers(tmp_path_factory.mktemp("trainers"))
    yield servers
    servers.close()
