"""Observe the routers of a mixture of experts in training, and add the gradient of the loss that balances experts.

Each router's module returns logits, weights and selected experts. A hook counts them, and hangs the balancing loss of
the layer on the weights: the backward through these then adds its gradient, whatever loss the last layer has. Thus it
is the same on each pipeline stage, and under recomputation, and no loss function knows of it.

R rows, L tokens per row, S samples, E experts, K of them for each token.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coati_rl.algorithms.load_balance import load_balancing_loss
from coati_rl.batch import MicroBatch
from coati_rl.config.model import ROUTED
from coati_rl.ops.host_copies import on_device
from consumer.models.context_cut import cut_context
from consumer.models.context_part import ContextRank

_ROUTING = "routing"  # the layers' argument
_EXTRA = 4  # numbers of a layer beside its counts: tokens, their entropies, the balancing loss, its weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Hold what routers need to know of a micro-batch, and what they have found in it."""

    tokens: Tensor  # bool[R * L], those of samples; the others are padding. Of a context-parallel rank its own alone
    paths: Tensor  # float32[S, R * L], see `load_balancing_loss`
    weights: Tensor  # float32[S]
    coeff: float  # of the balancing loss of a layer; 0: it is computed without gradient
    context: ContextRank | None = None  # of a context-parallel rank
    # float64[E + 4] by layer: tokens of each expert, tokens, sum of entropies in nats, balancing loss, sum of its
    # weights. A layer that is recomputed in the backward writes the same again.
    found: dict[int, Tensor] = field(default_factory=dict)


def make_routing(
    micro_batch: MicroBatch, *, coeff: float, device: torch.device, context: ContextRank | None = None
) -> Routing:
    """Return what routers need to know of a micro-batch with `loss_weights`.

    A sample's tokens are those of its path of segments, up to the one that predicts its last token: the same tokens in
    packed rows and behind a shared prefix.
    """
    num_rows, length = micro_batch.token_ids.shape
    arrays, segments = micro_batch.loss_arrays, micro_batch.segments.tolist()
    tokens = np.zeros((num_rows, length), dtype=bool)
    for row, start, size, _ in segments:
        tokens[row, start : start + size] = True
    samples = [
        (row, index)
        for row, of_row in enumerate(arrays["sample_index"])
        for index in np.unique(of_row[of_row >= 0]).tolist()
    ]
    paths = np.zeros((len(samples), num_rows, length), dtype=np.float32)
    weights = np.zeros(len(samples), dtype=np.float32)
    for place, (row, index) in enumerate(samples):
        its_own = arrays["sample_index"][row] == index
        last = int(arrays["sources"][row][its_own].max())
        of_row = (number for number, each in enumerate(segments) if each[0] == row)
        segment = next(n for n in of_row if segments[n][1] <= last < segments[n][1] + segments[n][2])
        while segment >= 0:
            _, start, size, parent = segments[segment]
            paths[place, row, start : min(start + size, last + 1)] = 1.0
            segment = parent
        paths[place] /= paths[place].sum()
        weights[place] = (arrays["loss_weights"][row] * arrays["loss_mask"][row])[its_own].sum()
    if context is not None:
        cut = cut_context(micro_batch, context.size)
        tokens, paths = (cut.own_tokens(each, context.rank) for each in (tokens, paths))
    return Routing(
        tokens=on_device(torch.from_numpy(tokens.reshape(-1)), device),
        paths=on_device(torch.from_numpy(paths.reshape(len(samples), tokens.size)), device),
        weights=on_device(torch.from_numpy(weights), device),
        coeff=coeff,
        context=context,
    )


class Routers:
    """Sum up what a model's routers find in the micro-batches of a step."""

    def __init__(self, num_experts: Mapping[int, int], coeff: float) -> None:
        """Store the arguments.

        Args:
            num_experts: of each decoder layer with experts, by its number, over all pipeline stages.
            coeff: of the balancing loss, which is the mean over these layers.
        """
        self._num_experts, self._coeff = num_experts, coeff
        self._found = dict[int, Tensor]()

    @classmethod
    def attached(cls, model: PreTrainedModel, coeff: float | None) -> "Routers":
        """Observe the routers of a whole model, if it has any. `coeff`: of the balancing loss; None: of no interest."""
        recorder = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits")
        num_experts = dict[int, int]()
        if coeff is None or model.config.model_type not in ROUTED or recorder is None:
            return cls(num_experts, 0.0)
        for number, layer in enumerate(model.base_model.layers):
            for router in (each for each in layer.modules() if isinstance(each, recorder.target_class)):
                num_experts[number] = len(router.weight)
                _observe(layer, router, number)
        return cls(num_experts, coeff)

    def routing(
        self, micro_batch: MicroBatch, device: torch.device, context: ContextRank | None = None
    ) -> Routing | None:
        """Return the argument of the layers for a micro-batch; None of a model without routers."""
        if not self._num_experts:
            return None
        coeff = self._coeff / len(self._num_experts)
        return make_routing(micro_batch, coeff=coeff, device=device, context=context)

    def add(self, routings: Iterable[Routing | None]) -> None:
        """Add what was found in micro-batches."""
        for each in routings:
            for layer, found in ({} if each is None else each.found).items():
                self._found[layer] = self._found[layer] + found if layer in self._found else found

    def metrics(
        self, add_over_ranks: Callable[[Tensor], Tensor], *, copies: int, device: torch.device
    ) -> dict[str, float | None]:
        """Return the metrics of a step, and begin the next; collective. None of a model without routers.

        Args:
            add_over_ranks: sums a tensor over all ranks.
            copies: tensor-parallel ranks, each of which counts the same tokens.
            device: of this rank.
        """
        if not self._num_experts:
            return {}
        found, self._found = self._found, {}
        width = max(self._num_experts.values()) + _EXTRA
        none = torch.zeros(width, dtype=torch.float64, device=device)
        total = add_over_ranks(torch.stack([found.get(layer, none) for layer in self._num_experts]))
        return router_metrics(total / copies)


def router_metrics(found: Tensor) -> dict[str, float | None]:
    """Return the step's metrics of routers.

    Args:
        found: float64[layers with experts, E + 4], see `Routing.found`, over all ranks.
    Returns: the largest share of an expert in its layer's tokens, relative to an equal share; experts without a token,
        over all layers; the mean entropy of routers in nats; the mean balancing loss, 1 in balance. None in a step
        without samples.
    """
    names = ("router_load_max", "router_idle_experts", "router_entropy_mean", "aux_loss")
    counts, (tokens, entropies, losses, weights) = found[:, :-_EXTRA], found[:, -_EXTRA:].T
    if not float(counts.sum()):
        return dict.fromkeys(names)
    loads = counts / counts.sum(dim=1, keepdim=True) * counts.shape[1]
    values = (
        loads.max(),
        (counts == 0).sum(),
        entropies.sum() / tokens.sum(),
        losses.sum() / weights.sum().clamp(min=1e-300),
    )
    return {name: float(value) for name, value in zip(names, values, strict=True)}


def _observe(layer: nn.Module, router: nn.Module, number: int) -> None:
    """Hook a decoder layer, which gets the micro-batch's `Routing` as an argument, and its router."""
    current: list[Routing | None] = [None]

    def enter(_: nn.Module, __: Any, arguments: Mapping[str, Any]) -> None:
        current[0] = arguments.get(_ROUTING)

    def leave(_: nn.Module, __: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
        return None if current[0] is None else _routed(current[0], number, *outputs)

    layer.register_forward_pre_hook(enter, with_kwargs=True)
    router.register_forward_hook(leave)


def _routed(
    routing: Routing, number: int, logits: Tensor, weights: Tensor, selected: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Count a router's choices. Returns: its outputs, whose weights also carry the balancing loss's gradient."""
    num_experts, context = logits.shape[-1], routing.context
    add = None if context is None else context.sum
    with torch.set_grad_enabled(torch.is_grad_enabled() and routing.coeff > 0):
        log_probabilities = logits.reshape(-1, num_experts).float().log_softmax(dim=-1)  # [R * L, E]
        probabilities = log_probabilities.exp()
        loss = load_balancing_loss(probabilities, selected, routing.paths, routing.weights, add_over_ranks=add)
    with torch.no_grad():
        counts = torch.bincount(selected[routing.tokens].flatten(), minlength=num_experts)
        entropy = -(probabilities * log_probabilities).sum(dim=-1)[routing.tokens].sum()
        # Ranks that share rows have the same samples, whose weights the first one counts.
        is_first = context is None or context.rank == 0
        extra = torch.stack([routing.tokens.sum(), entropy, loss.detach(), is_first * routing.weights.sum()])
        routing.found[number] = torch.cat([counts.double(), extra.double()])
    if loss.requires_grad:
        weights = _WithLoss.apply(weights, routing.coeff * loss)  # type: ignore[no-untyped-call]
    return logits, weights, selected


class _WithLoss(torch.autograd.Function):
    """Return a tensor unchanged, whose backward also gives a loss the gradient 1: losses are summed, never scaled."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), dtype=torch.float32, device=gradient.device)
