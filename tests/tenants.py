"""Make requests of Tinker's API, and compute what they ask for with plain torch and PEFT, one sequence at a time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from coati_rl.config.cli import build_job
from coati_rl.config.commands import OFFLINE
from coati_rl.tinker.core import Datum, LossRequest
from consumer.tenants.adapter_set import AdapterSet
from consumer.tenants.rank import TenantRank

VOCABULARY = 50
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
LENGTHS = (5, 17, 40, 9, 23, 3)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def make_data(seed: int, lengths: Sequence[int] = LENGTHS, *, width: int = 0) -> list[Datum]:
    """Sequences with the inputs of all losses; ratios lie on both sides of all bounds. `width`: K targets, 0: [N]."""
    rng = np.random.default_rng(seed)
    data = []
    for length in lengths:
        shape = (length, width) if width else (length,)
        floats = {
            "logprobs": rng.normal(size=shape) * 0.4 - 4,
            "advantages": rng.normal(size=shape),
            "weights": rng.random(shape),
            "sequence_ratio_mask": rng.random(shape) > 0.3,
        }
        inputs: dict[str, np.ndarray] = {name: value.astype(np.float32) for name, value in floats.items()}
        inputs["target_tokens"] = rng.integers(3, VOCABULARY, shape)
        data.append(Datum(tokens=rng.integers(3, VOCABULARY, length), inputs=inputs))
    return data


def request(model: str, seed: int, loss: str = "cross_entropy", **options: Any) -> LossRequest:
    lengths, width = options.pop("lengths", LENGTHS), options.pop("width", 0)
    return LossRequest(model=model, data=make_data(seed, lengths, width=width), loss=loss, **options)


def plain_loss(name: str, lp: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """The documented formulas, written again."""
    q, a = inputs["logprobs"], inputs["advantages"]
    if name == "cross_entropy":
        return -(inputs["weights"] * lp).sum()
    ratio = torch.exp(lp - q)
    if name == "importance_sampling":
        return -(ratio * a).sum()
    if name == "ppo":
        return -torch.min(ratio * a, torch.clamp(ratio, 0.8, 1.2) * a).sum()
    if name == "cispo":
        return -(torch.clamp(ratio, 0.0, 4.0).detach() * lp * a).sum()
    if name == "dro":
        return -(lp * a - 0.05 / 2 * (lp - q) ** 2).sum()
    mean = (lp.detach() - q)[inputs["sequence_ratio_mask"] != 0].mean()
    s = torch.exp(mean + lp - lp.detach())
    return -torch.min(s * a, torch.clamp(s, 0.8, 1.2) * a).sum()


def plain_pass(model: Any, data: Sequence[Datum], loss: str) -> tuple[float, list[Tensor]]:
    """Add the gradient of a request to a transformers model's. Returns: its loss and log-probabilities."""
    total, found = 0.0, []
    for datum in data:
        logits = model(torch.from_numpy(datum.tokens)[None]).logits[0]
        targets = torch.from_numpy(datum.inputs["target_tokens"])
        wide = targets if targets.dim() == 2 else targets[:, None]
        lp = torch.log_softmax(logits, -1).gather(-1, wide).view(targets.shape)
        term = plain_loss(loss, lp, {name: torch.from_numpy(value) for name, value in datum.inputs.items()})
        term.backward()
        total += float(term.detach())
        found.append(lp.detach())
    return total, found


def write_start(base: Path, directory: Path, *, rank: int = 4, seed: int = 0) -> None:
    """Write adapters by PEFT whose B is not 0, with scale 32 / rank."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=32, target_modules=TARGETS))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.02)
    adapted.save_pretrained(directory, save_embedding_layers=False)


def read_peft(base: Path, directory: Path) -> Any:
    """Load adapters by PEFT, to be trained."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, directory, is_trainable=True).eval()


def named(model: Any, what: str = "weight") -> dict[str, Tensor]:
    """The factors of a PEFT model, or their gradients, by this project's names."""
    found = {
        name.removeprefix("base_model.model.").replace(".default", ""): each
        for name, each in model.named_parameters()
        if "lora_" in name
    }
    return {name: each.grad if what == "grad" else each.detach() for name, each in found.items()}


def make_rank(base: Path, *, max_tokens: int = 64, **layout: Any) -> TenantRank:
    """A rank in this process, with few tokens a pass, so that requests are cut."""
    rank = TenantRank(torch.device("cpu"))
    rank.build(build_job({"model": str(base), "device": "cpu", **layout}, OFFLINE["sft"]), max_tokens)
    return rank


def whole_gradients(adapters: AdapterSet) -> dict[str, Tensor]:
    """The gradient's sum over all ranks, whole; it stays where it is. Collective."""
    total = adapters._gradient.clone()
    if adapters._layout.dp_group is not None:
        dist.all_reduce(total, group=adapters._layout.dp_group)
    return {name: adapters._full(name, each) for name, each in adapters._by_name(total).items()}


def worst(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest relative difference of a tensor."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - each).norm() / each.norm()) for name, each in expected.items())


def logprobs_of(results: dict, number: int = 0) -> list[np.ndarray]:
    """Return the log-probabilities of a request's sequences, of what a rank has computed."""
    return [values for _, _, values in sorted((r, i, v) for r, i, v in results["logprobs"] if r == number)]


def loss_of(results: dict, number: int = 0) -> float:
    """Return the loss of a request."""
    return sum(loss for each, loss in results["losses"] if each == number)
