"""Make a small model of the same architecture as a given one, with random weights, on which the architecture is tried.

Its config is the given one with few layers, a small vocabulary and narrow layers. A layer of each kind stays: sliding
and full attention, recurrent and sparse ones. What decides how a layer computes stays as it is: scales, caps, kinds of
rotary embeddings and their lengths. Only sliding windows become short, so that short samples exceed them. Sizes are
found by trying: the narrowest of a few divisors that the architecture accepts.
"""

import copy
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

VOCAB_SIZE = 128
FIRST_TOKEN = 3  # smaller ids are special tokens
_WINDOW = 6  # tokens of a sliding window
_MAX_LAYERS = 12
_NUM_EXPERTS = (8, 32)
_MLP_DIVISOR = 8  # of the layers' MLPs, beside that of all widths
_MAX_PARAMETERS = 2**28  # of a model that is made in memory
_ALIGNED = 64  # widths of a model that keeps its vocabulary are multiples of it: kernels of engines ask for that
_DIVISORS = {1, 2, 4, 8, 16, 32}  # beside those of the number of heads

_LAYERS, _KEY_HEADS = "num_hidden_layers", "num_key_value_heads"
_WIDTHS = re.compile(
    r"hidden_size|intermediate_size|intermediate_dim|ffn_|_ffn|inner|d_model|d_ff|dff|dim_ff|n_embd|emb_dim|embed_dim|"
    r"embedding_size|_width|d_ssm|n_heads?$|(num|n)_\w*heads$|num_query_groups"
)
_MLP = re.compile(r"intermediate|ffn_|_ffn|inner|d_ff|dff|dim_ff")
_EXPERTS = re.compile(r"(num|n|moe_num)_(local_|routed_)?experts$")
_WINDOWS = re.compile(r"sliding_window(_size)?$|attention_window_size$|attention_chunk_size$|local_attention$")


def tiny_model(
    config: Any,
    build: Callable[[Any], nn.Module],
    *,
    num_kv_heads: int = 1,
    num_layers: int = 2,
    keeps_vocabulary: bool = False,
    seed: int = 0,
) -> Any:
    """Return a small float32 model in evaluation mode, whose every weight changes its logits.

    Args:
        config: transformers config of the model that it stands for; it is not changed.
        build: makes a module with a config, such as `AutoModelForCausalLM.from_config`.
        num_kv_heads: at least so many heads for keys and values are kept, if the model has them.
        num_layers: at least so many layers are kept, if the model has them.
        keeps_vocabulary: tokens and sliding windows stay as well, for engines and the model's own tokenizer.
        seed: of its weights.
    Raises: ValueError if the architecture accepts no small size, with the error of the last one tried.
    """
    reason: Exception = ValueError("no size was tried")
    try:
        layers = _layers_to_keep(config, build, num_layers)
    except Exception as error:  # an architecture may refuse its own config by any error
        raise ValueError(f"{type(error).__name__}: {error}") from error
    for candidate in _candidates(config, layers, num_kv_heads, keeps_vocabulary=keeps_vocabulary):
        try:
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in build(copy.deepcopy(candidate)).parameters())
            if size > _MAX_PARAMETERS:
                raise ValueError(f"its smallest form has {size:,} parameters")
            with torch.random.fork_rng(devices=[]):  # the caller's random state stays
                torch.manual_seed(seed)
                model = build(candidate).float().eval()
            randomise(model, seed=seed)
            with torch.no_grad():
                model(input_ids=torch.arange(FIRST_TOKEN, FIRST_TOKEN + 2 * _WINDOW)[None], use_cache=False)
        except Exception as error:  # noqa: BLE001  an architecture may refuse a size by any error
            reason = error
        else:
            return model
    raise ValueError(f"{type(reason).__name__}: {reason}") from reason


@torch.no_grad()
def randomise(model: nn.Module, *, seed: int) -> None:
    """Add noise to all weights: logits then differ by some nats, and biases and norms are not 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        scale = 0.1 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def _candidates(config: Any, layers: Sequence[int], num_kv_heads: int, *, keeps_vocabulary: bool) -> Iterator[Any]:
    """Yield configs, the narrowest first."""
    total = getattr(config.get_text_config(), "num_attention_heads", None)
    divisors = (
        {each for each in range(1, total + 1) if total % each == 0} if isinstance(total, int) and total > 0 else set()
    )
    mlp_divisors = (_MLP_DIVISOR, 1, None) if keeps_vocabulary else (_MLP_DIVISOR, 1)
    widths = (True, False) if keeps_vocabulary else (False,)
    for num_heads, divisor, is_narrow in itertools.product(
        (2 * num_kv_heads, num_kv_heads), sorted(divisors | _DIVISORS, reverse=True), widths
    ):
        for num_experts, of_mlp in itertools.product((*_NUM_EXPERTS, None), mlp_divisors):
            candidate = copy.deepcopy(config)
            text = candidate.get_text_config()
            for name in getattr(candidate, "sub_configs", {}):
                _cut_layers(getattr(candidate, name, None), range(2))
            _cut_layers(text, layers)
            if not keeps_vocabulary:
                _cut_vocabulary(text)
                _cut_windows(text)
                if text is not candidate:
                    _cut_vocabulary(candidate)
            are_cut = _cut_widths(text, divisor, of_mlp, num_heads=num_heads, num_kv_heads=num_kv_heads)
            are_cut = are_cut and (not is_narrow or _narrow(text))
            are_cut = are_cut and (not keeps_vocabulary or _is_aligned(text, config.get_text_config()))
            if are_cut and (_cut_experts(text, num_experts) or num_experts is None):
                yield candidate


def _layers_to_keep(config: Any, build: Callable[[Any], nn.Module], least: int) -> Sequence[int]:
    """Return the layers that show every kind: the first ones up to the last new kind, or, of many, one of each kind."""
    total = getattr(config.get_text_config(), _LAYERS, None)
    if not isinstance(total, int) or total <= least:
        return range(total or least)
    with torch.device("meta"):
        module = build(copy.deepcopy(config))
    stack = next((m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m) == total), None)
    if stack is None:
        return range(least)
    kinds: dict[Any, int] = {}
    for index, layer in enumerate(stack):
        kinds.setdefault(_kind(layer), index)
    first = max(least, max(kinds.values()) + 1)
    return range(first) if first <= _MAX_LAYERS else sorted({*range(least), *kinds.values()})[:_MAX_LAYERS]


def _kind(layer: nn.Module) -> Any:
    """Return what tells two kinds of layers apart: their modules, shapes, and plain settings but for their number."""
    plain = (str, bool, int, float, type(None))
    return tuple(
        (
            name,
            type(module).__name__,
            tuple(
                sorted((key, str(v)) for key, v in vars(module).items() if isinstance(v, plain) and "idx" not in key)
            ),
            tuple((key, tuple(parameter.shape)) for key, parameter in module.named_parameters(recurse=False)),
        )
        for name, module in layer.named_modules()
    )


def _cut_layers(config: Any, layers: Sequence[int]) -> None:
    """Keep these layers: in their number, in settings with a value for each, and in lists of their indices."""
    total = getattr(config, _LAYERS, None)
    if not isinstance(total, int) or total <= len(layers):
        return
    place_of = {index: place for place, index in enumerate(layers)}
    for name, value in config.to_dict().items():
        if isinstance(value, dict) and value and all(str(key).isdigit() for key in value):  # by layer
            kept = {key: place_of[int(key)] for key in value if int(key) in place_of}
            setattr(config, name, {type(key)(place): value[key] for key, place in kept.items()})
        if not isinstance(value, list | tuple | str) or name in ("model_type", "architectures"):
            continue
        if len(value) == total and isinstance(value, str):
            setattr(config, name, "".join(value[index] for index in layers))
        elif len(value) == total:
            setattr(config, name, [value[index] for index in layers])
        elif value and all(isinstance(each, int) and 0 <= each < total for each in value):
            setattr(config, name, [place_of[index] for index in value if index in place_of])
    setattr(config, _LAYERS, len(layers))


def _cut_vocabulary(config: Any) -> None:
    for name, value in config.to_dict().items():
        is_large = isinstance(value, int) and value >= VOCAB_SIZE
        if is_large and "vocab_size" in name:
            setattr(config, name, VOCAB_SIZE)
        elif name.endswith("token_id") and (is_large or isinstance(value, list)):
            setattr(config, name, 0)


def _cut_windows(config: Any) -> None:
    for name, value in config.to_dict().items():
        if _WINDOWS.search(name) and isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, min(value, _WINDOW))


def _narrow(config: Any) -> bool:
    """Halve the width of the residual stream where that of heads is set apart. Returns: False where it is not."""
    width = getattr(config, "hidden_size", None)
    if not isinstance(config.to_dict().get("head_dim"), int) or not isinstance(width, int):
        return False
    config.hidden_size = width // _power_of_two([width])
    return True


def _power_of_two(sizes: Sequence[int]) -> int:
    """Return the largest power of two that divides all sizes and leaves them aligned."""
    power = 1
    while all(size and size % (2 * power * _ALIGNED) == 0 for size in sizes):
        power *= 2
    return power


def _is_aligned(small: Any, whole: Any) -> bool:
    """Whether the widths that are aligned in the whole config are so in the small one."""
    sizes, names = whole.to_dict(), [name for name in whole.to_dict() if name == "hidden_size" or _MLP.search(name)]
    wanted = [name for name in names if isinstance(sizes[name], int) and sizes[name] % _ALIGNED == 0]
    return all(getattr(small, name) % _ALIGNED == 0 for name in wanted)


def _cut_widths(config: Any, divisor: int, of_mlp: int | None, *, num_heads: int, num_kv_heads: int) -> bool:
    """Divide sizes and numbers of heads; of MLPs, without `of_mlp`, by a power of two.

    Returns: False if a size cannot be divided so.
    """
    heads, of_keys = (getattr(config, name, None) for name in ("num_attention_heads", _KEY_HEADS))
    if isinstance(heads, int) and heads // divisor < min(heads, num_heads):
        return False
    if isinstance(of_keys, int) and isinstance(heads, int):  # not fewer than asked for, and a divisor of the others
        of_keys = max(of_keys // divisor, min(of_keys, num_kv_heads))
        if heads // divisor % of_keys:
            return False
    for name, value in config.to_dict().items():
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in values):
            continue
        if _WINDOWS.search(name):
            continue
        if name == _KEY_HEADS:
            setattr(config, name, of_keys)
        elif _WIDTHS.search(name):
            by = divisor
            if _MLP.search(name):
                by = _power_of_two(values) if of_mlp is None else divisor * of_mlp
            if any(each > 1 and each % by for each in values):
                return False
            divided = [each // by if each > 1 else each for each in values]
            setattr(config, name, divided if isinstance(value, list) else divided[0])
    return True


def _cut_experts(config: Any, most: int | None) -> bool:
    """Keep at most so many experts. Returns: False if there are not more."""
    names = [name for name, value in config.to_dict().items() if _EXPERTS.search(name) and isinstance(value, int)]
    large = [name for name in names if most is not None and getattr(config, name) > most]
    for name in large:
        setattr(config, name, most)
    return bool(large)
