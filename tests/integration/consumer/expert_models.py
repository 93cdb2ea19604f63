"""Name tiny mixtures of experts, and what the trainers' layouts are compared on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from tests.integration.consumer.gradient_matrix import Run, Trial
from tests.integration.consumer.losses import LOSSES, Cut

ROUTED = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# One more than the ranks that share them out: six experts over two ranks and over three, some of which get no token.
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {"tied": True, **ROUTED, "norm_topk_prob": True}),
    # A dense layer between sparse ones.
    "qwen3_moe, some dense": ("qwen3_moe", {"tied": False, **ROUTED, "num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "qwen2_moe": ("qwen2_moe", {"tied": False, **ROUTED, "shared_expert_intermediate_size": 48}),
    "mixtral": ("mixtral", {"tied": False, "num_local_experts": 6}),
    "olmoe": ("olmoe", {"tied": False, "num_experts": 6, "num_experts_per_tok": 2}),
    "deepseek_v2": (
        "deepseek_v2",
        {
            "tied": False,
            "num_key_value_heads": 4,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": None,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "head_dim": 8,
        },
    ),
}
LAYOUTS_OF_EXPERTS = ("dp1", "dp2", "fsdp2_dp2", "pp2", "tp2", "tp2_pp2", "ep2", "ep2_dp2", "ep2_copies2", "fsdp2_tp2")
LAYOUTS_OF_EXPERTS += ("cp2", "cp2_ep2", "cp2_pp2", "cp2_tp2")
WITHOUT_STAGES = {"olmoe"}  # transformers declares no pipeline plan
WITH_SHARDS = {"qwen3_moe", "qwen3_moe, some dense", "qwen2_moe", "mixtral"}  # the others' plans are refused
MISREAD = {"qwen3_moe, some dense", "deepseek_v2"}  # by PEFT, which takes adapters of dense layers for experts'
CLIPPED = next(iter(LOSSES))
CUTS = (Cut(2, False, "several"), Cut(4, True, "uneven"), Cut(4, True, "one", True))  # padded, packed, shared prefixes


def trials_of_experts(layout: str) -> list[Trial]:
    """Every model with every cut in one process, elsewhere the first in all and the others in one each."""
    models = [name for name in EXPERTS if not ("pp" in layout and name in WITHOUT_STAGES)]
    models = [name for name in models if "tp" not in layout or name in WITH_SHARDS]
    models = [name for name in models if "cp" not in layout or cuts_of(name) == CUTS]
    if layout == "dp1":
        return [Trial(name, CLIPPED, cut) for name in models for cut in cuts_of(name)]
    own = [Trial(name, CLIPPED, cuts_of(name)[number % len(cuts_of(name))]) for number, name in enumerate(models)]
    return [*(Trial(models[0], CLIPPED, cut) for cut in CUTS), *own[1:]]


def cuts_of(name: str) -> tuple[Cut, ...]:
    """DeepSeek-V2's attention has no shared prefixes."""
    return CUTS[:2] if name == "deepseek_v2" else CUTS


RUNS_OF_EXPERTS = [(Run(layout, "fp32"), trials_of_experts(layout)) for layout in LAYOUTS_OF_EXPERTS]


@contextmanager
def linear_layers_alone(model: PreTrainedModel) -> Iterator[None]:
    """Have PEFT adapt layers of these names where they are linear.

    By the type of some mixtures it takes such names for those of experts, and adapts these in place.
    """
    kind = model.config.model_type
    model.config.model_type = "qwen2_moe" if kind in {"qwen3_moe", "mixtral", "olmoe", "deepseek_v2"} else kind
    yield
    model.config.model_type = kind
