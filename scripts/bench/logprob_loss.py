"""Time and memory of a PPO-clip loss through the LM head, forward and backward, three ways.

    python scripts/bench/logprob_loss.py --json result.json

naive: float32 logits of all tokens, log_softmax, gather, no entropy. recompute: `token_logprobs`. fused:
`fused_token_loss`. One thread; one process for the times, whose rounds take turns, and one more for the memory of each.
On a machine that others use too, CPU times say more than wall times. At the default sizes naive needs about 8 GiB.
T tokens, H hidden size, V vocabulary.
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

import torch
import torch.nn.functional as F
from torch import Tensor

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.ops.fused_loss import fused_token_loss
from coati_rl.ops.logprob import token_logprobs
from coati_rl.ops.vocab_chunks import CHUNK_ELEMENTS

LOSS = PolicyLoss()  # without a KL penalty this is PPO-clip
MIB = 2**20

Inputs = dict[str, Tensor]  # hidden, weight, and the arrays of a micro-batch of one row of T + 1 tokens


def make_inputs(num_tokens: int, hidden_size: int, vocabulary: int, dtype: torch.dtype) -> Inputs:
    """One row whose first token is the prompt; half the ratios lie outside the clip bounds."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, num_tokens + 1)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    hidden = normal(*shape, hidden_size).to(dtype).requires_grad_()
    weight = normal(vocabulary, hidden_size).mul_(hidden_size**-0.5).to(dtype).requires_grad_()
    loss_mask = torch.ones(shape, dtype=torch.bool)
    loss_mask[:, 0] = False
    inputs = {
        "hidden": hidden,
        "weight": weight,
        "token_ids": torch.randint(vocabulary, shape, generator=generator),
        "loss_mask": loss_mask,
        "loss_weights": torch.full(shape, 1 / num_tokens),
        "advantages": normal(*shape),
        "temperature": torch.full(shape, 0.8),
        "policy_version": torch.zeros(shape, dtype=torch.int32),
        "trainer_version": torch.tensor(0),
    }
    with torch.no_grad():
        now, _ = token_logprobs(hidden, weight, None, inputs["token_ids"], loss_mask, inputs["temperature"])
    return inputs | {"rollout_logprobs": now + 0.3 * normal(*shape)}


def naive_loss(inputs: Inputs, chunk_elements: int) -> Tensor:
    """The loss from the logits of all tokens at once."""
    logits = F.linear(inputs["hidden"][:, :-1], inputs["weight"]).float() / inputs["temperature"][:, 1:, None]
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, inputs["token_ids"][:, 1:, None]).squeeze(-1)
    logprobs = F.pad(logprobs, (1, 0))
    return LOSS(logprobs, torch.zeros_like(logprobs), inputs)[0]


def recompute_loss(inputs: Inputs, chunk_elements: int) -> Tensor:
    """The loss from chunked log-probabilities, whose logits the backward computes again."""
    names = ("token_ids", "loss_mask", "temperature")
    logprobs, entropy = token_logprobs(
        inputs["hidden"], inputs["weight"], None, *(inputs[name] for name in names), chunk_elements=chunk_elements
    )
    return LOSS(logprobs, entropy, inputs)[0]


def fused_loss(inputs: Inputs, chunk_elements: int) -> Tensor:
    """The loss whose gradient is computed with it."""
    arrays = {name: tensor for name, tensor in inputs.items() if name not in ("hidden", "weight")}
    return fused_token_loss(inputs["hidden"], inputs["weight"], None, arrays, LOSS, chunk_elements=chunk_elements)[0]


VARIANTS: dict[str, Callable[[Inputs, int], Tensor]] = {
    "naive": naive_loss,
    "recompute": recompute_loss,
    "fused": fused_loss,
}


def forward_backward(variant: str, inputs: Inputs, chunk_elements: int) -> float:
    """Leaves the gradients in `inputs`. Returns: the loss."""
    inputs["hidden"].grad = inputs["weight"].grad = None
    loss = VARIANTS[variant](inputs, chunk_elements)
    loss.backward()
    return loss.item()


def status_bytes(field: str) -> int:
    """A size from /proc/self/status."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def peak_extra_bytes(variant: str, inputs: Inputs, chunk_elements: int) -> int:
    """The largest resident set of a forward and backward, gradients included, above what the inputs hold."""
    forward_backward(variant, make_inputs(4, 8, 16, torch.float32), chunk_elements)  # what the libraries keep
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM := VmRSS
    before = status_bytes("VmRSS")
    forward_backward(variant, inputs, chunk_elements)
    return status_bytes("VmHWM") - before


def measure_memory(variant: str) -> int:
    """`peak_extra_bytes` in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", variant]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_times(
    variants: list[str], inputs: Inputs, chunk_elements: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """(wall, CPU) seconds of each round; variants take turns, so that a busy spell of the machine meets all of them."""
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
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk-elements", type=int, default=CHUNK_ELEMENTS)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--json", type=Path, help="also write sizes, times and peaks here")
    parser.add_argument("--memory-of", choices=list(VARIANTS), help=argparse.SUPPRESS)
    args = parser.parse_args()

    torch.set_num_threads(1)
    inputs = make_inputs(args.tokens, args.hidden, args.vocabulary, getattr(torch, args.dtype))
    if args.memory_of:
        print(peak_extra_bytes(args.memory_of, inputs, args.chunk_elements))
        return
    load_before = os.getloadavg()[0]
    times = measure_times(args.variants, inputs, args.chunk_elements, args.rounds)
    del inputs
    columns = {
        "wall s": {variant: statistics.median(wall_s for wall_s, _ in times[variant]) for variant in args.variants},
        "CPU s": {variant: statistics.median(cpu_s for _, cpu_s in times[variant]) for variant in args.variants},
        "peak MiB": {variant: measure_memory(variant) / MIB for variant in args.variants},
    }
    first = args.variants[0]
    print(f"{'median':10}" + "".join(f"{name:>10} {'of ' + first:>12}" for name in columns))
    for variant in args.variants:
        pairs = [(column[variant], column[variant] / column[first]) for column in columns.values()]
        print(f"{variant:10}" + "".join(f"{value:>10.2f} {ratio:>12.3f}" for value, ratio in pairs))
    if args.json:
        sizes = {name: getattr(args, name) for name in ("tokens", "vocabulary", "hidden", "dtype", "rounds")}
        machine = {"load_before": load_before, "load_after": os.getloadavg()[0], "torch": torch.__version__}
        report = sizes | {"chunk_elements": args.chunk_elements} | machine | {"times_s": times, "medians": columns}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
