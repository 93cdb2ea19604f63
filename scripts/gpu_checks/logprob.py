"""Log-probability and PPO-clip loss through a large LM head: ours against logits of all tokens at once.

In: sizes and a device. Out: seconds of forward and backward, peak memory above the inputs, and how far gradients are
from those of the naive way in float32. T tokens, H hidden size, V vocabulary.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.ops.fused_loss import fused_token_loss
from coati_rl.ops.logprob import token_logprobs
from gpu_checks.outcome import Outcome

LOSS = PolicyLoss()  # without a KL penalty this is PPO-clip
TEMPERATURE = 0.8
# log ratio of a token: far enough from the clip bounds that no rounding error decides on which side it is.
LOG_RATIOS = (-0.6, -0.1, -0.03, 0.03, 0.1, 0.6)
# Relative, of whole gradients, to the naive way's in float32. bfloat16 has a rounding error of 0.4 % a number.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.03}
MIB = 2**20

Inputs = dict[str, Tensor]  # hidden, weight, and the arrays of a micro-batch of one row of T + 1 tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobSettings:
    """Sizes; time and memory are those of bfloat16."""

    device: str
    num_tokens: int
    vocabulary: int
    hidden_size: int
    compared_tokens: int  # of the comparison of gradients, which the naive way in float32 has to fit
    rounds: int


def naive_loss(inputs: Inputs) -> Tensor:
    """The loss from the logits of all tokens at once."""
    logits = F.linear(inputs["hidden"][:, :-1], inputs["weight"]).float() / TEMPERATURE
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, inputs["token_ids"][:, 1:, None]).squeeze(-1)
    logprobs = F.pad(logprobs, (1, 0))
    return LOSS(logprobs, torch.zeros_like(logprobs), inputs)[0]


def recompute_loss(inputs: Inputs) -> Tensor:
    """The loss from `token_logprobs`, as a loss gets them that is not separable by token."""
    return LOSS(*_own_logprobs(inputs), inputs)[0]


def fused_loss(inputs: Inputs) -> Tensor:
    """The loss whose gradient is computed with it."""
    arrays = {name: tensor for name, tensor in inputs.items() if name not in ("hidden", "weight")}
    return fused_token_loss(inputs["hidden"], inputs["weight"], None, arrays, LOSS)[0]


VARIANTS: dict[str, Callable[[Inputs], Tensor]] = {
    "fused": fused_loss,
    "recompute": recompute_loss,
    "naive": naive_loss,
}


def check_logprob(settings: LogprobSettings, outcome: Outcome) -> None:
    """Compare gradients at few tokens, then time and measure at many."""
    device, sizes = torch.device(settings.device), (settings.hidden_size, settings.vocabulary)
    for dtype, tolerance in TOLERANCES.items():
        for name, error in gradient_errors(settings.compared_tokens, *sizes, dtype, device).items():
            figure = f"{name}_error_{str(dtype).removeprefix('torch.')}"
            outcome.figures[figure] = error
            outcome.expect(error <= tolerance, f"{figure} is {error:.2e}, above {tolerance:.0e}")
    outcome.figures["tokens"] = settings.num_tokens
    inputs = make_inputs(settings.num_tokens, *sizes, torch.bfloat16, device)
    for name, variant in VARIANTS.items():
        try:
            seconds, peak_bytes = measure(variant, inputs, settings.rounds, device)
        except torch.OutOfMemoryError:
            outcome.figures[f"{name}_s"] = "out of memory"
            outcome.expect(name == "naive", f"{name} ran out of memory")
        else:
            outcome.figures[f"{name}_s"] = seconds
            outcome.figures[f"{name}_peak_mib"] = peak_bytes and peak_bytes / MIB


def make_inputs(num_tokens: int, hidden_size: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    """One row whose first token is the prompt, at fixed distances from its own log-probabilities."""
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (1, num_tokens + 1)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    loss_mask = torch.ones(shape, dtype=torch.bool, device=device)
    loss_mask[:, 0] = False
    inputs = {
        "hidden": normal(*shape, hidden_size).to(dtype).requires_grad_(),
        "weight": normal(vocabulary, hidden_size).mul_(hidden_size**-0.5).to(dtype).requires_grad_(),
        "token_ids": torch.randint(vocabulary, shape, generator=generator, device=device),
        "loss_mask": loss_mask,
        "loss_weights": torch.full(shape, 1 / num_tokens, device=device),
        "advantages": normal(*shape),
        "temperature": torch.full(shape, TEMPERATURE, device=device),
        "policy_version": torch.zeros(shape, dtype=torch.int32, device=device),
        "trainer_version": torch.tensor(0, device=device),
    }
    with torch.no_grad():
        own, _ = _own_logprobs(inputs)
    ratios = torch.tensor(LOG_RATIOS, device=device)
    drawn = ratios[torch.randint(len(LOG_RATIOS), shape, generator=generator, device=device)]
    return inputs | {"rollout_logprobs": own - drawn}


def gradient_errors(
    num_tokens: int, hidden_size: int, vocabulary: int, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Variant -> the larger relative error of the two gradients, by norm; also of the naive way in this dtype."""
    inputs = make_inputs(num_tokens, hidden_size, vocabulary, dtype, device)
    exact = dict(inputs)
    for name in ("hidden", "weight"):
        exact[name] = inputs[name].detach().float().requires_grad_()
    if dtype != torch.float32:  # its own log-probabilities are others; the ratios stay what they were
        with torch.no_grad():
            difference = _own_logprobs(exact)[0] - _own_logprobs(inputs)[0]
        exact["rollout_logprobs"] = inputs["rollout_logprobs"] + difference
    expected = _gradients(naive_loss, exact)
    errors = {}
    for name, variant in VARIANTS.items():
        pairs = zip(_gradients(variant, inputs), expected, strict=True)
        errors[name] = max(float((found.float() - right).norm() / right.norm()) for found, right in pairs)
    return errors


def measure(
    variant: Callable[[Inputs], Tensor], inputs: Inputs, rounds: int, device: torch.device
) -> tuple[float, int | None]:
    """(median seconds of forward and backward, peak bytes above the inputs; None on a CPU)."""
    is_cuda, seconds, peak = device.type == "cuda", [], None
    for index in range(rounds + 1):  # the first, in which kernels are chosen, is not timed
        inputs["hidden"].grad = inputs["weight"].grad = None
        if is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        begin = time.perf_counter()
        variant(inputs).backward()
        if is_cuda:
            torch.cuda.synchronize(device)
            peak = torch.cuda.max_memory_allocated(device) - before
        if index:
            seconds.append(time.perf_counter() - begin)
    inputs["hidden"].grad = inputs["weight"].grad = None
    return statistics.median(seconds), peak


def _own_logprobs(inputs: Inputs) -> tuple[Tensor, Tensor]:
    names = ("token_ids", "loss_mask", "temperature")
    return token_logprobs(inputs["hidden"], inputs["weight"], None, *(inputs[name] for name in names))


def _gradients(variant: Callable[[Inputs], Tensor], inputs: Inputs) -> tuple[Tensor, ...]:
    return torch.autograd.grad(variant(inputs), (inputs["hidden"], inputs["weight"]))
