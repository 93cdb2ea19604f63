"""Measure time and memory of three implementations of a PPO-clip loss through the LM head, forward and backward.

    python scripts/bench/logprob_loss.py --json result.json
    python scripts/bench/logprob_loss.py --device cuda --json result.json        # bfloat16, T = 32,768, H = 2,048

naive: float32 logits of all tokens, log_softmax, gather, no entropy. recompute: `token_logprobs`. fused:
`fused_token_loss`. Rounds take turns. On a CPU: one thread; one process for the times, and one more for the memory of
each; on a machine that others use too, CPU times say more than wall times; at the default sizes naive needs about
8 GiB. On a GPU the first round, in which kernels are chosen, is not counted. T tokens, H hidden size, V vocabulary.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.ops.fused_loss import fused_token_loss
from coati_rl.ops.logprob import token_logprobs

LOSS = PolicyLoss()  # without a KL penalty this is PPO-clip
TEMPERATURE = 0.8
# Log ratios of tokens, far enough from the clip bounds that rounding errors do not change which are clipped.
LOG_RATIOS = (-0.6, -0.3, -0.03, 0.03, 0.4, 0.6)
MIB = 2**20
SIZES: dict[
    tuple[str, bool], tuple[Any, ...]
] = {  # device and --quick -> tokens, vocabulary, hidden size, rounds, dtype
    ("cpu", False): (4096, 151936, 512, 5, "float32"),
    ("cpu", True): (48, 300, 32, 1, "float32"),
    ("cuda", False): (32768, 151936, 2048, 5, "bfloat16"),
    ("cuda", True): (4096, 151936, 2048, 2, "bfloat16"),
}

Inputs = dict[str, Tensor]  # hidden, weight, and the arrays of a micro-batch of one row of T + 1 tokens


def make_inputs(num_tokens: int, hidden_size: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Return one row whose first token is the prompt; two thirds of the ratios are outside the clip bounds."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, num_tokens + 1)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    hidden = normal(*shape, hidden_size).to(dtype).requires_grad_()
    weight = normal(vocabulary, hidden_size).mul_(hidden_size**-0.5).to(dtype).requires_grad_()
    loss_mask = torch.ones(shape, dtype=torch.bool, device=device)
    loss_mask[:, 0] = False
    inputs = {
        "hidden": hidden,
        "weight": weight,
        "token_ids": torch.randint(vocabulary, shape, generator=generator, device=device),
        "sources": torch.arange(-1, shape[1] - 1, device=device)[None].expand(shape),
        "loss_mask": loss_mask,
        "loss_weights": torch.full(shape, 1 / num_tokens, device=device),
        "advantages": normal(*shape),
        "temperature": torch.full(shape, TEMPERATURE, device=device),
        "policy_version": torch.zeros(shape, dtype=torch.int32, device=device),
        "trainer_version": torch.tensor(0, device=device),
    }
    drawn = torch.randint(len(LOG_RATIOS), shape, generator=generator, device=device)
    return inputs | {"rollout_logprobs": own_logprobs(inputs) - torch.tensor(LOG_RATIOS, device=device)[drawn]}


def own_logprobs(inputs: Inputs) -> Tensor:
    """Return the inputs' log-probabilities, float32[1, T + 1], without gradient."""
    names = ("token_ids", "sources", "loss_mask", "temperature")
    with torch.no_grad():
        return token_logprobs(inputs["hidden"], inputs["weight"], None, *(inputs[name] for name in names))[0]


def naive_loss(inputs: Inputs, chunk_elements: int) -> Tensor:
    """Compute the loss from the logits of all tokens at once."""
    logits = F.linear(inputs["hidden"][:, :-1], inputs["weight"]).float() / TEMPERATURE
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, inputs["token_ids"][:, 1:, None]).squeeze(-1)
    logprobs = F.pad(logprobs, (1, 0))
    return LOSS(logprobs, torch.zeros_like(logprobs), inputs)[0]


def recompute_loss(inputs: Inputs, chunk_elements: int) -> Tensor:
    """Compute the loss from chunked log-probabilities, whose logits the backward recomputes."""
    names = ("token_ids", "sources", "loss_mask", "temperature")
    logprobs, entropy = token_logprobs(
        inputs["hidden"], inputs["weight"], None, *(inputs[name] for name in names), chunk_elements=chunk_elements
    )
    return LOSS(logprobs, entropy, inputs)[0]


def fused_loss(inputs: Inputs, chunk_elements: int) -> Tensor:
    """Compute the loss together with its gradient."""
    arrays = {name: tensor for name, tensor in inputs.items() if name not in ("hidden", "weight")}
    return fused_token_loss(inputs["hidden"], inputs["weight"], None, arrays, LOSS, chunk_elements=chunk_elements)[0]


VARIANTS: dict[str, Callable[[Inputs, int], Tensor]] = {
    "naive": naive_loss,
    "recompute": recompute_loss,
    "fused": fused_loss,
}


def forward_backward(variant: str, inputs: Inputs, chunk_elements: int) -> float:
    """Run forward and backward, leaving the gradients in `inputs`. Returns: the loss."""
    inputs["hidden"].grad = inputs["weight"].grad = None
    loss = VARIANTS[variant](inputs, chunk_elements)
    loss.backward()
    return loss.item()


def status_bytes(field: str) -> int:
    """Read a size from /proc/self/status."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def peak_extra_bytes(variant: str, inputs: Inputs, chunk_elements: int) -> int:
    """Return the largest resident set of a forward and backward, gradients included, above that of the inputs."""
    small = make_inputs(4, 8, 16, torch.float32, torch.device("cpu"))
    forward_backward(variant, small, chunk_elements)  # memory that the libraries keep
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM := VmRSS
    before = status_bytes("VmRSS")
    forward_backward(variant, inputs, chunk_elements)
    return status_bytes("VmHWM") - before


def measure_memory(variant: str) -> int:
    """Return `peak_extra_bytes`, measured in a new process."""
    command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", variant]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_gpu_memory(variant: str, inputs: Inputs, chunk_elements: int) -> int | None:
    """Return the peak of allocated GPU memory above that of the inputs; None if it does not fit."""
    inputs["hidden"].grad = inputs["weight"].grad = None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        forward_backward(variant, inputs, chunk_elements)
    except torch.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_allocated() - before


def measure_times(
    variants: list[str], inputs: Inputs, chunk_elements: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Return (wall, CPU) seconds of each round; variants take turns, so that other load affects all of them."""
    times: dict[str, list[tuple[float, float]]] = {variant: [] for variant in variants}
    losses: dict[str, float] = {}
    for index in range(rounds):
        for variant in variants[index % len(variants) :] + variants[: index % len(variants)]:
            start, cpu_start = time.perf_counter(), time.process_time()
            losses[variant] = forward_backward(variant, inputs, chunk_elements)
            wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
            times[variant].append((wall_s, cpu_s))
            print(f"round {index + 1}: {variant} {wall_s:.2f} s, CPU {cpu_s:.2f} s", file=sys.stderr, flush=True)
    print("loss: " + ", ".join(f"{name} {loss:.7f}" for name, loss in losses.items()), file=sys.stderr)
    return times


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--tokens", type=int, help="defaults of the sizes depend on the device")
    parser.add_argument("--vocabulary", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--chunk-elements", type=int, help="default: the device's")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--json", type=Path, help="also write sizes, times and peaks here")
    parser.add_argument("--memory-of", choices=list(VARIANTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = dict(
        zip(("tokens", "vocabulary", "hidden", "rounds", "dtype"), SIZES[args.device, args.quick], strict=True)
    )
    sizes |= {name: getattr(args, name) for name in sizes if getattr(args, name) is not None}

    torch.set_num_threads(1)
    dtype, device = getattr(torch, str(sizes["dtype"])), torch.device(args.device)
    inputs = make_inputs(sizes["tokens"], sizes["hidden"], sizes["vocabulary"], dtype, device)
    if args.memory_of:
        print(peak_extra_bytes(args.memory_of, inputs, args.chunk_elements))
        return
    load_before = os.getloadavg()[0]
    peaks: dict[str, int | None] = {}
    if args.device == "cuda":
        peaks = {variant: measure_gpu_memory(variant, inputs, args.chunk_elements) for variant in args.variants}
    fitting = [variant for variant in args.variants if peaks.get(variant, 0) is not None]
    times = measure_times(fitting, inputs, args.chunk_elements, sizes["rounds"])
    del inputs
    peaks = peaks or {variant: measure_memory(variant) for variant in args.variants}
    columns = {
        "wall s": {variant: statistics.median(wall_s for wall_s, _ in times[variant]) for variant in fitting},
        "CPU s": {variant: statistics.median(cpu_s for _, cpu_s in times[variant]) for variant in fitting},
        "peak MiB": {variant: (peaks[variant] or 0) / MIB for variant in fitting},
    }
    print(f"{'median':10}" + "".join(f"{name:>10} {'of ' + fitting[0]:>12}" for name in columns))
    for variant in fitting:
        pairs = [(column[variant], column[variant] / column[fitting[0]]) for column in columns.values()]
        print(f"{variant:10}" + "".join(f"{value:>10.2f} {ratio:>12.3f}" for value, ratio in pairs))
    for variant in set(args.variants) - set(fitting):
        print(f"{variant:10} does not fit into the GPU's memory")
    if args.json:
        machine = {"load_before": load_before, "load_after": os.getloadavg()[0], "torch": torch.__version__}
        machine |= {"device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu"}
        report = sizes | {"chunk_elements": args.chunk_elements} | machine | {"times_s": times, "medians": columns}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
