"""Read a model's sizes off its transformers config: what parameters it has, and what a rank holds of them.

Parameters are those of the module on torch's meta device, which has shapes and no memory, so that every architecture
that transformers can build is counted without a formula of its own. V vocabulary, H hidden size, A query heads times
head size, K key heads times head size, F intermediate size.
"""

import functools
import json
import re
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from coati_rl.config.model import PACKED_ATTENTION, ROUTED
from coati_rl.model_files.config import of_layers

_UNIFORM = PACKED_ATTENTION - ROUTED  # all layers have the same parameters, and each token passes all of them
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(.+)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Hold the sizes of a model, or of one tensor-parallel rank's part of it."""

    model_type: str  # of the transformers config
    hidden: int  # H
    queries: int  # A
    keys: int  # K; of values too
    intermediate: int  # F; beside experts that of the shared one, or the mean over layers of a dense layer's
    vocabulary: int  # V, this rank's rows of the LM head
    num_heads: int
    num_layers: int
    normalizes_heads: bool  # queries and keys, as Qwen3 does
    is_tied: bool  # LM head and embedding are one parameter
    layer_weights: int  # parameters of one decoder layer
    embedding_weights: int  # of the embedding
    head_weights: int  # of the LM head, 0 if it is tied; of a scalar head
    other_root_weights: int  # of what is left, such as the last norm
    largest_tensor: int  # parameters of the largest tensor, not cut
    # Of a mixture of experts, means over layers:
    expert_weights: int = 0  # of the parameters of a layer, those of its experts
    num_experts: int = 0  # E
    routed_experts: int = 0  # D, that a token is routed to
    routed_intermediate: int = 0  # D I, of these together
    has_shared_gate: bool = False  # the output of the shared expert is weighted, as Qwen2-MoE does
    active_weights: int = 0  # parameters that a token passes, of the whole model: of experts those that it is routed to

    @property
    def is_known(self) -> bool:
        """Whether the memory of activations is known: that of the architectures with packed attention."""
        return self.model_type in PACKED_ATTENTION

    @property
    def num_weights(self) -> int:
        """Parameters, tied ones once."""
        return self.num_layers * self.layer_weights + self.root_weights

    @property
    def root_weights(self) -> int:
        """Parameters outside of the decoder layers."""
        return self.embedding_weights + self.head_weights + self.other_root_weights


def model_shape(
    hf_config: Any, *, tensor_parallel_size: int = 1, has_scalar_head: bool = False, cuts_all: bool = False
) -> ModelShape:
    """Return what one tensor-parallel rank holds of a model.

    Args:
        hf_config: transformers config of its text part.
        tensor_parallel_size: ranks that share each matrix of the architecture's tensor-parallel plan, and the rows of
            embedding and LM head; other parameters are whole on each.
        has_scalar_head: one output in place of the vocabulary.
        cuts_all: all matrices of layers are shared, as vLLM's engines do, also those that the plan leaves whole.
    Raises: ValueError for an architecture that transformers cannot build.
    """
    return _shape(_config_json(hf_config), tensor_parallel_size, has_scalar_head, cuts_all)


_JSON: dict[tuple[type, str], str] = {}  # of the few configs of a process; a search asks for the same ones many times


def _config_json(hf_config: Any) -> str:
    """Return all values of a config as text; `to_dict` copies every one of them, which takes a millisecond."""
    key = type(hf_config), repr(vars(hf_config))
    if key not in _JSON:
        _JSON[key] = json.dumps(hf_config.to_dict(), sort_keys=True, default=str)
    return _JSON[key]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearLayer:
    """Hold the sizes of a linear layer's weight, [out, in]."""

    name: str  # its last part, such as q_proj
    in_size: int
    out_size: int
    style: str | None  # colwise or rowwise, as the architecture's tensor-parallel plan cuts it; None: it is whole


def linear_layers(hf_config: Any) -> tuple[LinearLayer, ...]:
    """Return the linear layers of all decoder layers of a model."""
    text = _config_json(hf_config)
    parameters = _parameters(text)
    layers = []
    for name, shape in parameters.sizes.items():
        module, _, kind = found[2].rpartition(".") if (found := _LAYER.search(name)) else ("", "", "")
        if kind == "weight" and module in parameters.linear:
            last, style = module.rpartition(".")[2], _style(hf_config, module)
            layers.append(LinearLayer(name=last, in_size=shape[1], out_size=shape[0], style=style))
    return tuple(layers)


@functools.lru_cache(maxsize=64)
def _shape(config_json: str, tensor_parallel_size: int, has_scalar_head: bool, cuts_all: bool) -> ModelShape:
    from transformers import AutoConfig

    values = json.loads(config_json)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    sizes = _parameters(config_json).sizes
    cut = functools.partial(_cut, config, tensor_parallel_size, cuts_all)
    num_heads, num_keys, head_dim = head_sizes(config)
    num_heads, num_keys = num_heads // tensor_parallel_size, num_keys // tensor_parallel_size
    of_layer: dict[int, int] = {}
    experts = list[tuple[int, tuple[int, ...]]]()  # of each tensor: parameters on this rank, and its whole shape
    gates = embedding = head = other = 0
    for name, shape in sizes.items():
        count = cut(name, shape)
        if found := _LAYER.search(name):
            of_layer[int(found[1])] = of_layer.get(int(found[1]), 0) + count
            if _is_of_experts(name, shape):
                experts.append((count, shape))
            gates += count if name.endswith("gate_proj.weight") else 0
        elif name.startswith("lm_head"):
            head += count
        elif shape[0] == config.vocab_size:
            embedding += count
        else:
            other += count
    layers, routed = max(1, len(of_layer)), getattr(config, "num_experts_per_tok", None) or 0
    dense = (of_layers(config, "intermediate_size") or 4 * config.hidden_size) // tensor_parallel_size
    return ModelShape(
        model_type=config.model_type,
        hidden=config.hidden_size,
        queries=num_heads * head_dim,
        keys=num_keys * head_dim,
        intermediate=-(-gates // config.hidden_size // layers) if experts else dense,
        vocabulary=1 if has_scalar_head else config.vocab_size // tensor_parallel_size,
        num_heads=num_heads,
        num_layers=config.num_hidden_layers,
        normalizes_heads=any("q_norm" in name for name in sizes),
        is_tied=not head and not has_scalar_head,
        layer_weights=-(-sum(of_layer.values()) // layers),
        embedding_weights=embedding,
        head_weights=config.hidden_size if has_scalar_head else head,
        other_root_weights=other,
        largest_tensor=max(prod(shape) for shape in sizes.values()),
        expert_weights=sum(count for count, _ in experts) // layers,
        num_experts=-(-sum(shape[0] for _, shape in experts) // 2 // layers),  # two tensors a layer
        routed_experts=-(-routed * len(experts) // 2 // layers),
        routed_intermediate=-(-routed * sum(prod(s) // s[0] for _, s in experts) // (3 * config.hidden_size) // layers),
        has_shared_gate=any("shared_expert_gate" in name for name in sizes),
        active_weights=sum(_active(config, name, shape) for name, shape in sizes.items()),
    )


def head_sizes(hf_config: Any) -> tuple[int, int, int]:
    """Return a layer's query heads, its key heads, and the size of a head."""
    num_heads = of_layers(hf_config, "num_attention_heads") or hf_config.num_attention_heads
    num_keys = of_layers(hf_config, "num_key_value_heads") or num_heads
    return num_heads, num_keys, of_layers(hf_config, "head_dim") or hf_config.hidden_size // num_heads


class _Parameters(NamedTuple):
    sizes: dict[str, tuple[int, ...]]  # by name
    linear: frozenset[str]  # linear layers, by their names within a decoder layer


@functools.lru_cache(maxsize=16)
def _parameters(config_json: str) -> "_Parameters":
    """Return the parameters of a causal language model, tied ones once.

    All layers of a dense architecture with packed attention have the same parameters, so that one of them is built.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = json.loads(config_json)
    model_type, num_layers = values.pop("model_type"), values.get("num_hidden_layers", 1)
    if model_type in _UNIFORM:
        values |= {"num_hidden_layers": 1, "layer_types": None}
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
    sizes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    if model_type in _UNIFORM:
        layer = {name: shape for name, shape in sizes.items() if _LAYER.search(name)}
        for number in range(1, num_layers):
            sizes |= {name.replace(".0.", f".{number}.", 1): shape for name, shape in layer.items()}
    named = [
        found[2]
        for name, each in module.named_modules()
        if isinstance(each, torch.nn.Linear) and (found := _LAYER.search(name))
    ]
    return _Parameters(sizes=sizes, linear=frozenset(named))


def _cut(config: Any, tensor_parallel_size: int, cuts_all: bool, name: str, shape: tuple[int, ...]) -> int:
    """Return the elements that a tensor-parallel rank holds of a parameter."""
    count = prod(shape)
    if tensor_parallel_size == 1:
        return count
    found = _LAYER.search(name)
    if found is None:
        is_cut = shape[0] == config.vocab_size
    elif cuts_all:
        is_cut = len(shape) > 1
    else:
        module, _, kind = found[2].rpartition(".")
        style = _style(config, module)
        is_cut = style in ("colwise", "moe_tp_experts") or (style == "rowwise" and kind == "weight")
    return -(-count // tensor_parallel_size) if is_cut else count


def _active(config: Any, name: str, shape: tuple[int, ...]) -> int:
    """Return the parameters of a tensor that a token passes: of experts, [E, ...], those that it is routed to."""
    per_token: int = getattr(config, "num_experts_per_tok", None) or 0
    is_routed = _is_of_experts(name, shape) and per_token > 0
    return prod(shape) * per_token // shape[0] if is_routed else prod(shape)


def _is_of_experts(name: str, shape: tuple[int, ...]) -> bool:
    """Return True for a tensor of all experts of a layer, [E, ...]."""
    return ".experts." in name and len(shape) > 2


def _style(config: Any, module: str) -> str | None:
    """Return how the architecture's plan cuts a module of a decoder layer."""
    plan = getattr(config, "base_model_tp_plan", None) or {}
    style: str | None = plan.get(f"layers.*.{module}")
    return style
