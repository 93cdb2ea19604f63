"""Name the model that is trained, its source and its precision."""

from typing import Any, Literal

from coati_rl.config.fields import Section, experiment
from coati_rl.config.user_paths import UserPath

# Architectures whose attention the trainers compute sample by sample, without transformers' masks, so that samples can
# share prefixes: `model_type` of their transformers config.
PACKED_ATTENTION = frozenset({"llama", "mistral", "mixtral", "olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
# Architectures whose routers' probabilities are the softmax of their logits, as the balancing loss has them.
ROUTED = frozenset({"deepseek_v2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"})
# What trainers do with the experts that engines chose: nothing, compare them with their own, or compute with them.
RouterReplay = Literal["none", "measure", "rollout"]
# Tokens of the longest sample up to which a CPU computes the attention of half-precision samples in float32.
FLOAT32_ATTENTION = 512


def aux_loss_coeff() -> Any:
    """Return the field of the jobs whose loss weighs tokens."""
    return experiment(
        0.0,
        "Weight of the loss that balances the experts of a mixture, of each sample by itself: 1 in balance, the mean "
        "over layers, and over samples as the loss weighs their tokens. Dense models have none.",
        ge=0,
    )


class ModelConfig(Section):
    """The policy's weights and their precision."""

    model: UserPath = experiment("Qwen/Qwen2.5-7B", "Model directory in HF format, or a hub id.", short="-m")
    precision: Literal["fp32", "bf16"] | None = experiment(
        None,
        "Precision of trainer, engine and weight wire; bf16 keeps fp32 masters. Default: bf16 on GPUs and with ZeRO.",
    )
