"""Check that a model can be cut over ranks: divisible sizes, supported parallelism plans, attention by segments.

transformers' config classes declare, by architecture, which layers to shard and how (`base_model_tp_plan`) and which
modules come before and after the decoder layers (`base_model_pp_plan`). A style that is not supported would silently
give wrong gradients, so it is refused by name. All functions take the model's transformers config.
"""

import math
from collections.abc import Mapping
from typing import Any

from coati_rl.config.model import PACKED_ATTENTION, ROUTED
from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError
from coati_rl.model_files.config import of_layers

# Sharded by output features, sharded by input features, and replicated with the gradient summed over ranks.
TP_STYLES = frozenset({"colwise", "rowwise", "replicated_with_grad_allreduce"})
# Of the experts of a layer, which are shared out whole; transformers' plan cuts each of them by the styles of its
# parameters, which are left out.
EXPERTS = "moe_tp_experts"
PP_PARTS = frozenset({"embed_tokens", "layers", "norm"})
TESTED = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
)  # architectures whose gradients are compared in tests; see `proofs.layout`
_TESTED_TEXT = f"{', '.join(TESTED)} (tested); other architectures are tried before a job starts"

_TP_PLAN, _PP_PLAN = "base_model_tp_plan", "base_model_pp_plan"
_TIED_EMBEDDING = ("embed_tokens", "embedding_rowwise")  # transformers adds it to the plan of tied models
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_CUT_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")


def check_layout(config: TrainingConfig, hf_config: Any, name: str = "") -> None:
    """Check tp, pp and cp against a model's sizes, plans and attention.

    Args:
        config: of the run.
        hf_config: of the model.
        name: the model by its flag, for messages; empty: the run's own.
    Raises: ConfigError with all broken rules, one per line.
    """
    tp, pp = config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size
    cp, ep = config.parallel.context_parallel_size, config.parallel.expert_parallel_size
    problems = {
        f"-tp {tp}": (_tensor_plan_problem(hf_config) or _sizes_problem(tp, hf_config)) if tp > 1 else None,
        f"-pp {pp}": (_pipeline_plan_problem(hf_config) or _depth_problem(pp, hf_config)) if pp > 1 else None,
        f"--context-parallel {cp}": _attention_problem(hf_config) if cp > 1 else None,
        f"--expert-parallel {ep}": _experts_problem(ep, hf_config, is_policy=not name) if ep > 1 else None,
    }
    model = name or f"--model {config.model.model}"
    lines = [f"{flag}: {problem} ({model})" for flag, problem in problems.items() if problem]
    if lines:
        raise ConfigError("\n".join(lines))


def tensor_parallel_plan(hf_config: Any) -> dict[str, str]:
    """Return the style, of TP_STYLES or EXPERTS, by pattern of module names, "layers.*.[...]", without the embedding.

    Raises: ConfigError if the architecture declares no plan, or one with other styles.
    """
    if problem := _tensor_plan_problem(hf_config):
        raise ConfigError(f"tensor parallelism: {problem}")
    plan = getattr(hf_config.get_text_config(), _TP_PLAN)
    return {
        pattern: style
        for pattern, style in plan.items()
        if (pattern, style) != _TIED_EMBEDDING and not _is_of_experts(pattern, plan)
    }


def check_pipeline_plan(hf_config: Any) -> None:
    """Raise a ConfigError unless the model consists of an embedding, decoder layers and a norm in sequence."""
    if problem := _pipeline_plan_problem(hf_config):
        raise ConfigError(f"pipeline parallelism: {problem}")


def _is_handled(pattern: str, style: str, plan: Mapping[str, str]) -> bool:
    """Return True for a supported style of a decoder layer; the vocabulary is sharded independent of the plan."""
    is_known = style in TP_STYLES or style == EXPERTS or _is_of_experts(pattern, plan)
    return (pattern.startswith("layers.*.") and is_known) or (pattern, style) == _TIED_EMBEDDING


def _is_of_experts(pattern: str, plan: Mapping[str, str]) -> bool:
    """Return True for a parameter of experts."""
    return plan.get(pattern.rpartition(".")[0]) == EXPERTS


def _tensor_plan_problem(hf_config: Any) -> str | None:
    model = hf_config.get_text_config()
    plan = getattr(model, _TP_PLAN, None) or {}
    others = [f"{pattern}: {style}" for pattern, style in plan.items() if not _is_handled(pattern, style, plan)]
    if plan and not others:
        return None
    what = f"declares unsupported styles ({', '.join(others)})" if others else "declares no tensor-parallel plan"
    return f"the architecture {model.model_type} {what}; use -tp 1 or one of {_TESTED_TEXT}"


def _pipeline_plan_problem(hf_config: Any) -> str | None:
    model = hf_config.get_text_config()
    plan = getattr(model, _PP_PLAN, None) or {}
    if plan.keys() == PP_PARTS:
        return None
    what = f"declares unsupported parts ({', '.join(plan)})" if plan else "declares no pipeline plan"
    return f"the architecture {model.model_type} {what}; use -pp 1 or one of {_TESTED_TEXT}"


def _attention_problem(hf_config: Any) -> str | None:
    model_type = hf_config.get_text_config().model_type
    if model_type in PACKED_ATTENTION:
        return None
    others = ", ".join(sorted(PACKED_ATTENTION))
    return f"the attention of the architecture {model_type} is not cut by tokens; use --context-parallel 1 or {others}"


def _experts_problem(ep: int, hf_config: Any, *, is_policy: bool) -> str | None:
    """Return why experts cannot be shared out. Other models than the policy may have none."""
    model = hf_config.get_text_config()
    if model.model_type not in ROUTED:
        return f"the architecture {model.model_type} has no experts; use --expert-parallel 1" if is_policy else None
    number = next(size for name in _NUM_EXPERTS if isinstance(size := of_layers(model, name), int))
    return f"must divide num_experts {number}; use --expert-parallel {math.gcd(ep, number)}" if number % ep else None


def _sizes_problem(tp: int, hf_config: Any) -> str | None:
    """Return the sizes that tp does not divide: heads, MLP and vocabulary must be split evenly."""
    model = hf_config.get_text_config()
    has_experts = EXPERTS in (getattr(model, _TP_PLAN, None) or {}).values()
    names = (*_CUT_SIZES, *(_NUM_EXPERTS if has_experts else ()))
    sizes = {name: size for name in names if isinstance(size := of_layers(model, name), int)}
    broken = [f"{name} {size}" for name, size in sizes.items() if size % tp]
    if not broken:
        return None
    common = math.gcd(*sizes.values())
    works = [str(n) for n in range(1, common + 1) if common % n == 0]
    return f"must divide {' and '.join(broken)}; use -tp {' or '.join(works)}"


def _depth_problem(pp: int, hf_config: Any) -> str | None:
    layers = hf_config.get_text_config().num_hidden_layers
    return f"more stages than num_hidden_layers {layers}; use -pp {layers} or less" if pp > layers else None
