"""Compare a merged model with its base with the adapter: log-probabilities of tokens at random, or a head's values.

Both are computed by transformers in float32, whatever the files' dtype, of the same token ids. Where weights are stored
in float32, a sum of products is rounded in another order: the bound is 1e-4 nats. Where they are rounded to bfloat16
there are two bounds: 1e-4 nats to the base whose adapted weights are rounded in the same way, so that nothing else
differs; and on average rounding may change half as much as the adapter does: else most of training would be lost.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from coati_rl.errors import ConfigError, RunError
from coati_rl.model_files.adapted_layers import FACTORS
from coati_rl.model_files.adapter_files import AdapterDirectory
from coati_rl.model_files.quiet import no_load_report, no_progress_bars
from coati_rl.model_files.stored import read_stored
from consumer.adapters.adapters import Adapters, AdapterSource
from consumer.adapters.lm_head import untie_lm_head
from consumer.models.scalar_head import scalar_head
from consumer.parallel.layout import Layout
from consumer.parallel.parameters import describe_parameters

BOUND = 1e-4  # nats, or values of a scalar head up to 1; larger ones: of their size
_MAX_ROUNDING = 0.5  # of what the adapter does
_NUM_SEQUENCES, _NUM_TOKENS = 4, 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Hold the differences between the outputs of a merged model and of others, over all tokens."""

    num_values: int
    largest: float  # to the base with the adapter
    mean: float
    mean_of_base: float  # of the base alone to the base with the adapter: what the adapter does
    is_rounded: bool  # weights are not stored in float32
    is_zero: bool  # the adapter changes no weight


def prove(merged: Path, base: Path, adapter: AdapterDirectory, names: Mapping[str, str], *, where: str) -> Proof:
    """Compare the model of a directory with a base with an adapter.

    Args:
        merged: directory of the merged model.
        base: of the model without the adapter.
        adapter: of the base.
        names: of the merged model's tensors by the parameters that they are, or are parts of.
        where: what named the adapter, for messages.
    Raises: RunError if they differ by more than the bound, or the merged model is the base; ConfigError if rounding has
        changed more than the adapter.
    """
    stored = read_stored(merged, f"model {merged}")
    dtypes = {name: stored[each].meta.dtype for name, each in names.items() if each in stored}
    found = _outputs(_load(merged, adapter))
    model = _load(base, adapter)
    adapters = _attach(model, adapter)
    adapted = _outputs(model)
    with adapters.off():
        plain = _outputs(model)
        is_rounded = any(dtypes[f"{name}.weight"] is not torch.float32 for name in adapters.layers)
        exact = _rounded_outputs(model, adapters, dtypes) if is_rounded else adapted
    proof = Proof(
        num_values=found.numel(),
        largest=float((found - adapted).abs().max()),
        mean=float((found - adapted).abs().mean()),
        mean_of_base=float((plain - adapted).abs().mean()),
        is_rounded=is_rounded,
        is_zero=_is_zero(model, adapters),
    )
    size = exact.abs().clamp_min(1.0) if adapter.has_scalar_head else torch.ones_like(exact)
    error = float(((found - exact).abs() / size).max())
    if not error < BOUND:
        raise RunError(
            f"{where}: the merged model is not the base with the adapter: outputs differ by {error:.2g}, and {BOUND:g} "
            "is allowed; nothing was written. Please report it"
        )
    if not proof.is_zero and torch.equal(found, plain):
        raise RunError(f"{where}: the merged model computes what the base {base} does; nothing was written")
    if not proof.is_zero and is_rounded and proof.mean > _MAX_ROUNDING * proof.mean_of_base:
        raise ConfigError(
            f"{where}: rounding to the base's dtype changes outputs by {proof.mean:.2g} on average, and the adapter by "
            f"{proof.mean_of_base:.2g}: it would be lost; use --precision fp32"
        )
    return proof


def _load(directory: Path, adapter: AdapterDirectory) -> Any:
    auto: Any = AutoModelForSequenceClassification if adapter.has_scalar_head else AutoModelForCausalLM
    labels = {"num_labels": 1} if adapter.has_scalar_head else {}
    with no_progress_bars(), no_load_report():  # a base lacks the scalar head
        return auto.from_pretrained(directory, dtype=torch.float32, trust_remote_code=False, **labels).eval()


def _attach(model: Any, adapter: AdapterDirectory) -> Adapters:
    takes_lm_head = not adapter.has_scalar_head
    if takes_lm_head:
        untie_lm_head(model, adapter.spec.targets)
    infos = describe_parameters(model, Layout(), [model.config.get_text_config().num_hidden_layers])
    source = AdapterSource(
        spec=adapter.spec, base=adapter.base, directory=adapter.directory, takes_lm_head=takes_lm_head
    )
    adapters = Adapters(model, infos, source)
    adapters.attach(model, Layout())
    return adapters


def _token_ids(vocab_size: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(_NUM_SEQUENCES):
        yield torch.randint(vocab_size, (1, _NUM_TOKENS), generator=generator)


@torch.no_grad()
def _outputs(model: Any) -> Tensor:
    """Return the log-probabilities of all tokens but the first ones in nats, or the scalar head's values."""
    head, found = scalar_head(model), []
    for token_ids in _token_ids(model.config.get_text_config().vocab_size):
        if head is not None:
            found.append(head(model.base_model(token_ids).last_hidden_state).flatten())
            continue
        logprobs = model(token_ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        found.append(logprobs.gather(1, token_ids[0, 1:, None]).flatten())
    return torch.cat(found)


@torch.no_grad()
def _rounded_outputs(model: Any, adapters: Adapters, dtypes: dict[str, torch.dtype]) -> Tensor:
    """Return the outputs with the adapters in the weights, rounded to the dtypes; the model keeps them."""
    for name, parameter in model.named_parameters():
        layer = name.removesuffix(".weight")
        if layer in adapters.layers:
            linear = model.get_submodule(layer)
            a, b = (getattr(linear, factor).weight for factor in FACTORS)
            parameter.copy_(adapters.merged(parameter, a, b, dtypes[name]))
        elif name in dtypes:
            parameter.copy_(parameter.to(dtypes[name]))
    return _outputs(model)


def _is_zero(model: Any, adapters: Adapters) -> bool:
    """Return True if no adapter's product changes a weight; what is trained in full is in both models."""
    layers = [model.get_submodule(layer) for layer in adapters.layers]
    return all(not layer.lora_B.weight.any() or not layer.lora_A.weight.any() for layer in layers)
