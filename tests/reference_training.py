"""Train adapters with plain transformers and torch: an implementation of Tinker's training part by its published
formulae that shares no code with the project's.

One datum is one forward pass, so that nothing depends on what else is computed.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from coati_rl.tinker.core import AdamStep, Datum, LossRequest, LossResult, ModelSpec, RequestError

ALPHA = 32.0
_KINDS = {
    "trains_attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "trains_mlp": ("gate_proj", "up_proj", "down_proj"),
    "trains_head": ("lm_head",),
}
_NEEDS = {
    "cross_entropy": (),
    "importance_sampling": ("logprobs", "advantages"),
    "ppo": ("logprobs", "advantages"),
    "cispo": ("logprobs", "advantages"),
    "dro": ("logprobs", "advantages"),
    "gspo": ("logprobs", "advantages", "sequence_ratio_mask"),
}


@dataclass
class _Model:
    spec: ModelSpec
    weights: dict[str, torch.Tensor]  # NAME.lora_A, NAME.lora_B
    moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    step: int = 0


class ReferenceTraining:
    """Implement `TrainingCore`."""

    def __init__(self, directory: Path) -> None:
        self._base: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._base.eval().requires_grad_(False)
        self.max_tokens, self.vocab_size = self._base.config.max_position_embeddings, self._base.config.vocab_size
        self._directory = directory
        self._models: dict[str, _Model] = {}
        self._active: _Model | None = None
        self._layers: dict[str, nn.Linear] = {}
        kinds = [name for names in _KINDS.values() for name in names]
        for name, module in self._base.named_modules():
            if isinstance(module, nn.Linear) and name.split(".")[-1] in kinds:
                self._layers[name] = module
                module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[..., Any]:
        def add(_: Any, inputs: Any, output: Any) -> Any:
            model = self._active
            if model is None or f"{name}.lora_A" not in model.weights:
                return output
            a, b = model.weights[f"{name}.lora_A"], model.weights[f"{name}.lora_B"]
            return output + (inputs[0] @ a.T) @ b.T * (ALPHA / model.spec.rank)

        return add

    def create(self, model: str, spec: ModelSpec) -> None:
        if spec.rank < 1:
            raise RequestError("rank 0 is not computed here")
        generator = torch.Generator().manual_seed(spec.seed)
        weights = {}
        for name, layer in self._layers.items():
            if any(getattr(spec, kind) and name.split(".")[-1] in names for kind, names in _KINDS.items()):
                rows = torch.rand(spec.rank, layer.in_features, generator=generator) * 2 - 1
                weights[f"{name}.lora_A"] = (rows / math.sqrt(layer.in_features)).requires_grad_()
                weights[f"{name}.lora_B"] = torch.zeros(layer.out_features, spec.rank, requires_grad=True)
        self._models[model] = _Model(spec, weights)

    def check(self, request: LossRequest) -> None:
        self._of(request.model)
        if request.loss not in _NEEDS:
            raise RequestError(f"loss_fn {request.loss!r} is not served; use {', '.join(_NEEDS)}")
        for index, datum in enumerate(request.data):
            self._check_datum(f"data[{index}]", datum, request.loss)

    def _check_datum(self, where: str, datum: Datum, loss: str) -> None:
        if missing := {"target_tokens", *_NEEDS[loss]} - datum.inputs.keys():
            raise RequestError(f"{where}: {loss} needs {sorted(missing)}")
        targets, length = datum.inputs["target_tokens"], len(datum.tokens)
        if not 1 <= length <= self.max_tokens or targets.shape[:1] != (length,) or targets.ndim > 2:
            raise RequestError(f"{where}: {length} tokens with targets of the shape {targets.shape}")
        if any(each.shape != targets.shape for each in datum.inputs.values()):
            raise RequestError(f"{where}: arrays have other shapes than target_tokens")
        for ids in (datum.tokens, targets):
            if ids.size and not (ids.min() >= 0 and ids.max() < self.vocab_size):
                raise RequestError(f"{where}: a token is not below {self.vocab_size}")

    def _of(self, model: str) -> _Model:
        if model not in self._models:
            raise RequestError(f"no model {model}")
        return self._models[model]

    def forward_backward(self, requests: Sequence[LossRequest]) -> list[LossResult | RequestError]:
        return [self._one(request) for request in requests]

    def _one(self, request: LossRequest) -> LossResult:
        self._active = self._of(request.model)
        logprobs, total = [], 0.0
        try:
            with torch.set_grad_enabled(not request.is_forward_only):
                for datum in request.data:
                    found, loss = self._datum(datum, request)
                    if not request.is_forward_only:
                        loss.backward()
                    logprobs.append(found)
                    total += float(loss.detach())
        finally:
            self._active = None
        return LossResult(logprobs=logprobs, metrics={"loss:sum": total})

    def _datum(self, datum: Datum, request: LossRequest) -> tuple[np.ndarray, torch.Tensor]:
        ids = torch.from_numpy(datum.tokens.copy())[None]
        logits = self._base(ids, use_cache=False).logits[0].float()
        inputs = {name: torch.from_numpy(np.array(each)) for name, each in datum.inputs.items()}
        targets = inputs.pop("target_tokens")
        rows = torch.log_softmax(logits, -1)
        logp = rows.gather(-1, targets.reshape(len(targets), -1)).reshape(targets.shape)
        return logp.detach().numpy().copy(), _loss(request.loss, logp, inputs, request.settings)

    def optim_step(self, model: str, step: AdamStep) -> dict[str, float]:
        found = self._of(model)
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in found.weights.items()}
        norm = float(torch.stack([each.norm() for each in gradients.values()]).norm())
        factor = step.grad_clip_norm / norm if 0 < step.grad_clip_norm < norm else 1.0
        found.step += 1
        with torch.no_grad():
            for name, weight in found.weights.items():
                zeros = (torch.zeros_like(weight), torch.zeros_like(weight))
                mean, square = found.moments.setdefault(name, zeros)
                gradient = gradients[name] * factor
                mean.lerp_(gradient, 1 - step.beta1)
                square.mul_(step.beta2).addcmul_(gradient, gradient, value=1 - step.beta2)
                scale = (square / (1 - step.beta2**found.step)).sqrt() + step.eps
                weight.mul_(1 - step.learning_rate * step.weight_decay)
                weight.addcdiv_(mean / (1 - step.beta1**found.step), scale, value=-step.learning_rate)
                weight.grad = None
        return {"grad_norm:mean": norm}

    def save(self, model: str, directory: Path, *, with_optimizer: bool) -> None:
        found = self._of(model)
        prefix = "base_model.model."
        tensors = {f"{prefix}{n}.weight": p.detach().contiguous() for n, p in found.weights.items()}
        save_file(tensors, directory / "adapter_model.safetensors")
        targets = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in found.weights})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(self._directory),
            "r": found.spec.rank,
            "lora_alpha": int(ALPHA),
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": targets,
            "inference_mode": True,
        }
        (directory / "adapter_config.json").write_text(json.dumps(config))
        if with_optimizer:
            moments = {f"{n}.{k}": t for n, pair in found.moments.items() for k, t in zip("mv", pair, strict=True)}
            save_file(moments, directory / "adam.safetensors")
        (directory / "spec.json").write_text(json.dumps({"spec": asdict(found.spec), "step": found.step}))

    def load(self, model: str, directory: Path, *, with_optimizer: bool) -> None:
        try:
            about = json.loads((directory / "spec.json").read_text())
            tensors = load_file(directory / "adapter_model.safetensors")
        except OSError as error:
            raise RequestError(f"{directory} is no checkpoint") from error
        spec = ModelSpec(**about["spec"])
        names = {name.removeprefix("base_model.model.").removesuffix(".weight"): name for name in tensors}
        loaded = _Model(spec, {own: tensors[name].clone().requires_grad_() for own, name in names.items()})
        if with_optimizer:
            moments, loaded.step = load_file(directory / "adam.safetensors"), about["step"]
            if moments:
                loaded.moments = {n: (moments[f"{n}.m"].clone(), moments[f"{n}.v"].clone()) for n in names}
        self._models[model] = loaded

    def drop(self, model: str) -> None:
        self._models.pop(model, None)

    def close(self) -> None:
        self._models.clear()


def _loss(name: str, logp: torch.Tensor, inputs: dict[str, torch.Tensor], settings: Any) -> torch.Tensor:
    if name == "cross_entropy":
        return -(logp * inputs.get("weights", torch.ones_like(logp))).sum()
    advantages, log_ratio = inputs["advantages"], logp - inputs["logprobs"]
    ratio = log_ratio.exp()
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    if name == "dro":
        return -(logp * advantages - 0.5 * settings.get("beta", 0.05) * log_ratio**2).sum()
    low, high = (0.0, 4.0) if name == "cispo" else (0.8, 1.2)
    low, high = settings.get("clip_low_threshold", low), settings.get("clip_high_threshold", high)
    if name == "cispo":
        return -(ratio.clamp(low, high).detach() * logp * advantages).sum()
    if name == "gspo":
        mask = inputs["sequence_ratio_mask"] != 0
        ratio = torch.exp(log_ratio.detach()[mask].mean() + logp - logp.detach())
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()
