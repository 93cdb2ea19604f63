"""Record which experts transformers' routers choose in each pass of the decoding batch.

B rows, L tokens of the pass, D decoder layers, K experts of a token.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coati_rl.config.model import ROUTED
from coati_rl.errors import EngineError
from coati_rl.routes import route_dtype, unknown_routes


class RouteRecorder:
    """Hold the choices of the last pass; a router's forward hook writes them."""

    def __init__(self, model: Any) -> None:
        """Hook the routers. Raises: EngineError if the model has none of a known kind."""
        if model.config.model_type not in ROUTED:
            known = ", ".join(sorted(ROUTED))
            raise EngineError(f"--router-replay: routes are those of {known}, not of {model.config.model_type}")
        self._num_layers = len(model.base_model.layers)
        self._chosen: dict[int, Tensor] = {}  # int64[B * L, K] by layer
        router_class = model.base_model._can_record_outputs["router_logits"].target_class
        for number, layer in enumerate(model.base_model.layers):
            for router in (each for each in layer.modules() if isinstance(each, router_class)):
                self._shape = (self._num_layers, router.top_k)
                self._dtype = route_dtype(router.num_experts)
                router.register_forward_hook(partial(self._record, number))

    def _record(self, layer: int, _: Any, __: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        self._chosen[layer] = outputs[2]

    def take(self, token_ids: Tensor) -> np.ndarray:
        """Return the routes of the pass of token_ids [B, L]: uint[B, L, D, K], see `coati_rl.routes`."""
        routes = unknown_routes(token_ids.numel(), self._shape, self._dtype)
        layers = list(self._chosen)
        chosen = torch.stack([self._chosen[layer] for layer in layers], dim=1).cpu().numpy()
        routes[:, layers] = chosen.astype(self._dtype)
        return routes.reshape(*token_ids.shape, *self._shape)
