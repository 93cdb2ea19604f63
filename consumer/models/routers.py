"""Observe the routers of a mixture of experts in training, replay routes, and add the gradient of the balancing loss.

Each router's module returns logits, weights and selected experts. A hook counts them, and hangs the balancing loss of
the layer on the weights: the backward through these then adds its gradient, whatever loss the last layer has. Thus it
is the same on each pipeline stage, and under recomputation, and no loss function knows of it.

Where routes are replayed, the hook puts the experts that the engine chose in place of the router's own (rollout routing
replay, arXiv:2510.11370). Their weights are computed from the router's logits as it weighs its own choice, so that it
is trained as before. The balancing loss counts the experts that compute, and has the router's own probabilities.

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
from coati_rl.config.model import ROUTED, RouterReplay
from coati_rl.ops.host_copies import on_device
from consumer.models.context_cut import cut_context
from consumer.models.context_part import ContextRank
from consumer.models.route_replay import engine_choice, expert_weights, share_of_others

_ROUTING = "routing"  # the layers' argument
# Numbers of a layer beside its counts: tokens, their entropies, the balancing loss, its weights; tokens up to the one
# that predicts a sample's last, those of them with a known route, and the shares of these that the router differs in.
_EXTRA = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """Hold the samples of a micro-batch that is trained, as routers see them."""

    tokens: Tensor  # bool[R * L], those of samples; the others are padding. Of a context-parallel rank its own alone
    paths: Tensor  # float32[S, R * L], see `load_balancing_loss`
    weights: Tensor  # float32[S]
    coeff: float  # of the balancing loss of a layer; 0: it is computed without gradient
    context: ContextRank | None = None  # of a context-parallel rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Hold what routers need to know of a micro-batch, and what they have found in it."""

    balance: Balance | None  # None: it is scored, and nothing is observed
    routes: Tensor | None = None  # uint[R * L, D, K] of the engine, see `coati_rl.routes`
    replays: bool = False  # these compute; else they are compared alone
    # float64[E + 7] by layer: tokens of each expert, and `_EXTRA`. A layer that is recomputed in the backward writes
    # the same again.
    found: dict[int, Tensor] = field(default_factory=dict)


def make_balance(
    micro_batch: MicroBatch, *, coeff: float, device: torch.device, context: ContextRank | None = None
) -> Balance:
    """Return what routers need to know of the samples of a micro-batch with `loss_weights`.

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
    return Balance(
        tokens=on_device(torch.from_numpy(tokens.reshape(-1)), device),
        paths=on_device(torch.from_numpy(paths.reshape(len(samples), tokens.size)), device),
        weights=on_device(torch.from_numpy(weights), device),
        coeff=coeff,
        context=context,
    )


class Routers:
    """Sum up what a model's routers find in the micro-batches of a step."""

    def __init__(self, num_experts: Mapping[int, int], coeff: float, replay: RouterReplay = "none") -> None:
        """Store the arguments.

        Args:
            num_experts: of each decoder layer with experts, by its number, over all pipeline stages.
            coeff: of the balancing loss, which is the mean over these layers.
            replay: what is done with the engines' routes.
        """
        self._num_experts, self._coeff, self._replay = num_experts, coeff, replay
        self._found = dict[int, Tensor]()

    @classmethod
    def attached(cls, model: PreTrainedModel, coeff: float | None, replay: RouterReplay = "none") -> "Routers":
        """Observe the routers of a whole model, if it has any. `coeff`: of the balancing loss; None: of no interest."""
        recorder = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits")
        num_experts = dict[int, int]()
        if coeff is None or model.config.model_type not in ROUTED or recorder is None:
            return cls(num_experts, 0.0)
        for number, layer in enumerate(model.base_model.layers):
            for router in (each for each in layer.modules() if isinstance(each, recorder.target_class)):
                num_experts[number] = len(router.weight)
                _observe(layer, router, number)
        return cls(num_experts, coeff, replay)

    def routing(
        self, micro_batch: MicroBatch, device: torch.device, context: ContextRank | None = None
    ) -> Routing | None:
        """Return the argument of the layers for a micro-batch that is trained; None of a model without routers."""
        if not self._num_experts:
            return None
        coeff = self._coeff / len(self._num_experts)
        return Routing(
            balance=make_balance(micro_batch, coeff=coeff, device=device, context=context),
            routes=None if self._replay == "none" else _on_device(_own_routes(micro_batch, context), device),
            replays=self._replay == "rollout",
        )

    def replayed(
        self, micro_batch: MicroBatch, device: torch.device, context: ContextRank | None = None
    ) -> Routing | None:
        """Return the argument for a micro-batch that is scored; None where no routes are replayed."""
        if not self._num_experts or self._replay != "rollout" or micro_batch.routes is None:
            return None
        return Routing(balance=None, routes=_on_device(_own_routes(micro_batch, context), device), replays=True)

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
        return router_metrics(total / copies, has_routes=self._replay != "none")


def replayed_routing(routes: np.ndarray, device: torch.device) -> Routing:
    """Return the argument of the layers for a forward that replays routes, uint[R, L, D, K], and observes nothing."""
    return Routing(balance=None, routes=_on_device(routes, device), replays=True)


def _own_routes(micro_batch: MicroBatch, context: ContextRank | None) -> np.ndarray | None:
    """Return the routes of this rank's tokens, uint[R, l, D, K]; None if no token's are known."""
    routes = micro_batch.routes
    if routes is None or context is None:
        return routes
    cut = cut_context(micro_batch, context.size)
    return cut.own_tokens(routes.transpose(2, 3, 0, 1), context.rank).transpose(2, 3, 0, 1)


def _on_device(routes: np.ndarray | None, device: torch.device) -> Tensor | None:
    return None if routes is None else on_device(torch.tensor(routes.reshape(-1, *routes.shape[2:])), device)


def router_metrics(found: Tensor, *, has_routes: bool = False) -> dict[str, float | None]:
    """Return the step's metrics of routers.

    Args:
        found: float64[layers with experts, E + 7], see `Routing.found`, over all ranks.
        has_routes: engines return routes.
    Returns: the largest share of an expert in its layer's tokens, relative to an equal share; experts without a token,
        over all layers; the mean entropy of routers in nats; the mean balancing loss, 1 in balance. With routes, of
        all tokens and layers: the share of the engine's choices that are not the router's, and the share of tokens
        whose routes are not known. None in a step without samples.
    """
    names = ["router_load_max", "router_idle_experts", "router_entropy_mean", "aux_loss"]
    names += ["route_mismatch", "route_missing"] if has_routes else []
    counts, (tokens, entropies, losses, weights, used, known, others) = found[:, :-_EXTRA], found[:, -_EXTRA:].T
    if not float(counts.sum()):
        return dict.fromkeys(names)
    loads = counts / counts.sum(dim=1, keepdim=True) * counts.shape[1]
    values = [
        loads.max(),
        (counts == 0).sum(),
        entropies.sum() / tokens.sum(),
        losses.sum() / weights.sum().clamp(min=1e-300),
    ]
    if has_routes:
        values += [others.sum() / known.sum().clamp(min=1), 1 - known.sum() / used.sum().clamp(min=1)]
    return {name: float(value) for name, value in zip(names, values, strict=True)}


def _observe(layer: nn.Module, router: nn.Module, number: int) -> None:
    """Hook a decoder layer, which gets the micro-batch's `Routing` as an argument, and its router."""
    current: list[Routing | None] = [None]

    def enter(_: nn.Module, __: Any, arguments: Mapping[str, Any]) -> None:
        current[0] = arguments.get(_ROUTING)

    def leave(_: nn.Module, __: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
        return None if current[0] is None else _routed(current[0], router, number, *outputs)

    layer.register_forward_pre_hook(enter, with_kwargs=True)
    router.register_forward_hook(leave)


def _routed(
    routing: Routing, router: nn.Module, number: int, logits: Tensor, weights: Tensor, selected: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a router's outputs with the experts that are replayed, and count them.

    The weights also carry the balancing loss's gradient.
    """
    # Of each token: whether its route is known, and the share of experts in it that the router has not selected.
    of_routes = torch.zeros((2, len(selected)), device=logits.device)
    if routing.routes is not None:
        chosen, is_known = engine_choice(routing.routes, number, selected, num_experts=logits.shape[-1])
        of_routes = torch.stack([is_known.float(), share_of_others(chosen, selected)])
        if routing.replays:
            selected, weights = chosen, expert_weights(router, logits, chosen).to(weights.dtype)
    if routing.balance is not None:
        loss = _observed(routing, routing.balance, number, logits, selected, of_routes)
        if loss.requires_grad:
            weights = _WithLoss.apply(weights, routing.balance.coeff * loss)
    return logits, weights, selected


def _observed(
    routing: Routing, balance: Balance, number: int, logits: Tensor, selected: Tensor, of_routes: Tensor
) -> Tensor:
    """Count a router's choices. Returns: the balancing loss."""
    num_experts = logits.shape[-1]
    with torch.set_grad_enabled(torch.is_grad_enabled() and balance.coeff > 0):
        log_probabilities = logits.reshape(-1, num_experts).float().log_softmax(dim=-1)  # [R * L, E]
        probabilities = log_probabilities.exp()
        add = None if balance.context is None else balance.context.sum
        loss = load_balancing_loss(probabilities, selected, balance.paths, balance.weights, add_over_ranks=add)
    with torch.no_grad():
        counts = torch.bincount(selected[balance.tokens].flatten(), minlength=num_experts)
        entropy = -(probabilities * log_probabilities).sum(dim=-1)[balance.tokens].sum()
        used = (balance.paths > 0).any(dim=0)
        # Ranks that share rows have the same samples, whose weights the first one counts.
        is_first = balance.context is None or balance.context.rank == 0
        of_samples = (balance.tokens.sum(), entropy, loss.detach(), is_first * balance.weights.sum())
        extra = (*of_samples, used.sum(), *(of_routes * used).sum(dim=1))
        routing.found[number] = torch.cat([counts.double(), torch.stack([each.double() for each in extra])])
    return loss


class _WithLoss(torch.autograd.Function):
    """Return a tensor unchanged, whose backward also gives a loss the gradient 1: losses are summed, never scaled."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), dtype=torch.float32, device=gradient.device)
