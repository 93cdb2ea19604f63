"""Train in one process with plain torch, without sharding or communication."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from consumer.models.loading import convert
from consumer.models.policy_model import HeadWeights, PolicyInput, policy_forward
from consumer.parallel.gradient_reduction import GradientReducer, accumulate_in_float32
from consumer.parallel.layout import Layout
from consumer.parallel.parallelism import accumulate_each, local_head, score_each
from consumer.parallel.parameters import LocalParameters, ParameterInfo


class SingleProcess:
    """Implement `Parallelism` with one rank; no process group is needed."""

    def __init__(self, *, device: torch.device) -> None:
        self.layout = Layout()
        self.device = device

    def layers_per_stage(self, model: PreTrainedModel) -> list[int]:
        """Return the model's number of layers: there is one stage."""
        return [model.config.get_text_config().num_hidden_layers]

    def shard(
        self,
        model: PreTrainedModel,
        infos: Sequence[ParameterInfo],
        optimizer: torch.optim.Optimizer | None,
        attach: Callable[[nn.Module], None] | None = None,
    ) -> "WholeModel":
        """Move the model to the device."""
        model.to(self.device)
        if attach is not None:
            attach(model)
        convert(model)
        return WholeModel(model, infos, optimizer)

    def num_micro_batches(self, wanted: int) -> int:
        """Return `wanted`."""
        return wanted

    def sum_over_ranks(self, value: float) -> float:
        """Return the number unchanged."""
        return value

    def add_over_ranks(self, values: Tensor) -> Tensor:
        """Return the tensor unchanged."""
        return values

    def reduce_sums(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Return the sums as floats."""
        return {name: float(value) for name, value in sums.items()}

    def broadcast_text(self, text: str | None) -> str:
        """Return the text unchanged."""
        return text or ""

    def agree(self, action: Callable[[], str | None] | None) -> list[str]:
        """Run the action, and return its text."""
        return [(None if action is None else action()) or ""]

    def close(self) -> None:
        """Do nothing: there are no process groups."""


class WholeModel:
    """Implement `ShardedModel` without sharding. In bfloat16 the optimizer updates float32 copies of the weights."""

    def __init__(
        self, module: PreTrainedModel, infos: Sequence[ParameterInfo], optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Take the module on its device; for the optimizer see `Parallelism.shard`."""
        self._module = module
        module.forward = policy_forward.__get__(module)
        self._optimizer: Any = optimizer
        self.parameters = LocalParameters(module, infos, Layout())
        self._reducer = GradientReducer(self.parameters, Layout())
        self._float32_masters: dict[int, Tensor] = {}  # by id of the bfloat16 parameter
        if optimizer is not None:
            accumulate_in_float32(module)
        if optimizer is not None and module.dtype != torch.float32:
            for group in optimizer.param_groups:
                self._float32_masters |= {id(p): p.detach().float() for p in group["params"]}
                group["params"] = [self._float32_masters[id(p)] for p in group["params"]]

    def score(self, inputs: Sequence[PolicyInput]) -> list[Tensor]:
        return score_each(self._module, inputs)

    def head_weights(self) -> HeadWeights:
        return local_head(self._module)

    def accumulate(self, inputs: Sequence[PolicyInput]) -> dict[str, Tensor]:
        return accumulate_each(self._module, inputs, self._reducer.after_backward)

    def reduce_gradients(self) -> dict[str, Tensor]:
        return self._reducer.reduce()

    def forget_gradients(self) -> None:
        self._reducer.forget()

    def masters(self) -> dict[str, Tensor]:
        return {name: self._float32_masters.get(id(p), p) for name, p in self.parameters.trained.items()}

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        masters = self.masters()
        for name, gradient in gradients.items():
            masters[name].grad = gradient
        self._optimizer.step()
        with torch.no_grad():
            for name, parameter in self.parameters.trained.items():
                if masters[name] is not parameter:
                    parameter.copy_(masters[name])
                    masters[name].grad = None  # it would stay until the next step, beside that one's gradients
