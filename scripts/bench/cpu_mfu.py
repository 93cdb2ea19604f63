"""Measure the MFU of optimizer steps on one CPU thread, of the trainers' backend and of plain transformers.

    OMP_NUM_THREADS=1 python scripts/bench/cpu_mfu.py --model DIR [--precision fp32 bf16] [--rounds 5] [--json FILE]

In: random tokens, groups of samples of one prompt, packed into rows of at most `--budget` tokens; every sample has its
own copy of its prompt and an advantage, so that both ways compute the same. Plain: transformers' SDPA under its
block-diagonal mask, logits of the loss's tokens alone, fused AdamW (`training_loops.py`). Out: medians of whole steps,
from NumPy arrays to updated weights; both ways and the peak take turns within each round.

The FLOPs are `mfu.step_flops`, for T tokens of which the loss counts T': 6 N T of the layers' matrix products (N their
weights), 6 V H T' of the LM head, and 12 for each pair of a query and a key that it sees, layer and unit of width.
Embedding look-ups, norms, the optimizer and what is computed twice do not count. Before the timed steps torch counts
the matrix products that each way executes, attention's left out; nothing is measured if they are not 6 N T + 6 V H T'.
MFU is the share of a measured peak: the rate of the best of some square matrix products in the same thread and dtype,
torch's or, where they are faster, those of `coati_rl.ops.cpu_products`; the share of torch's is printed beside it.
Nothing is printed of a precision unless losses and gradient norms agree in every step.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mfu import step_flops
from random_model import save_random_model
from shared_prefix import make_samples, micro_batches_of, with_logprobs
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from trainer_process import run_as_trainer
from training_loops import MAX_NORM, TOLERANCES, WEIGHT_DECAY, BackendLoop, PlainLoop, check_agreement, load
from transformers import PreTrainedModel

from coati_rl.batch import MicroBatch
from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.model_files.quiet import no_progress_bars
from coati_rl.ops.cpu_products import product
from consumer.backend import make_backend
from consumer.backend_config import BackendConfig, trained
from consumer.models.policy_model import DTYPES
from consumer.parallel.process_group import destroy_process_group, init_process_group
from consumer.parallel.store_location import StoreLocation

OURS, PLAIN = "ours", "plain transformers"
Step = Callable[[], tuple[float, float]]  # takes an optimizer step; the mean loss, the norm before clipping
TORCH = "torch"
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {TORCH: torch.mm, "the trainers'": product}
PEAK_SIZES = (1024, 2048, 4096)  # of square matrices
TIMEOUT_S = 300.0
FLAGS = {
    "prompts": (8, "prompts of an optimizer step"),
    "samples": (8, "samples of a prompt"),
    "prompt": (100, "tokens of a prompt"),
    "response": (128, "tokens of a response"),
    "budget": (1024, "tokens of a micro-batch, at least those of a sample"),
    "rounds": (5, "timed steps of each way"),
    "seed": (0, "of weights and tokens"),
    "hidden": (256, "hidden size without --model, a multiple of 64"),
    "layers": (4, "decoder layers without --model"),
    "vocab": (8192, "vocabulary without --model"),
}


def flop_per_s(multiply: Callable[[Tensor, Tensor], Tensor], size: int, dtype: torch.dtype) -> float:
    """Measure FLOP/s of a matrix product."""
    left, right = torch.randn(2, size, size).to(dtype)
    multiply(left, right)  # libraries prepare themselves
    begin = time.perf_counter()
    multiply(left, right)
    return 2 * size**3 / (time.perf_counter() - begin)


def executed_flops(step: Step) -> tuple[int, dict[str, float]]:
    """Take a step. Returns: the FLOPs of its matrix products, without batched ones and attention; loss and norm."""
    in_place, onednn = torch.ops.aten.addmm_, torch.ops.mkldnn._linear_pointwise  # torch does not count these by itself
    products = (torch.ops.aten.mm, torch.ops.aten.addmm, in_place, onednn)
    with FlopCounterMode(display=False, custom_mapping={in_place: _addmm_flops, onednn: _linear_flops}) as counter:
        loss, norm = step()
    counts = counter.get_flop_counts()["Global"]
    return int(sum(counts.get(product, 0) for product in products)), {"loss": loss, "norm": norm}


def _addmm_flops(_: Sequence[int], left: Sequence[int], right: Sequence[int], **__: object) -> int:
    """Return the FLOPs of a product of matrices of these shapes."""
    return 2 * left[0] * left[1] * right[1]


def _linear_flops(rows: Sequence[int], weight: Sequence[int], *_: object, **__: object) -> int:
    """Return the FLOPs of rows [..., K] @ weight.T, of a weight [N, K]."""
    return 2 * math.prod(rows) * weight[0]


def timed_step(step: Step) -> dict[str, float]:
    """Take a step. Returns: its seconds, CPU seconds, mean loss and gradient norm."""
    wall, cpu = time.perf_counter(), time.process_time()
    loss, norm = step()
    seconds = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    return {**seconds, "loss": loss, "norm": norm}


def count_flops(
    steps: dict[str, Step], model: PreTrainedModel, micro_batches: tuple[MicroBatch, ...], tolerance: float
) -> dict[str, int]:
    """Take a step each way and count its FLOPs.

    Raises: SystemExit if a way executes other matrix products, or the losses or norms differ.
    """
    lengths = [length for micro_batch in micro_batches for length in micro_batch.segments[:, 2].tolist()]
    counted = sum(int(micro_batch.loss_arrays["loss_mask"].sum()) for micro_batch in micro_batches)
    # Without the pairs of attention, which are of squared lengths.
    products = step_flops(model, lengths, counted, with_attention=False)
    found = {}
    for name, step in steps.items():
        executed, found[name] = executed_flops(step)
        if executed != products:
            sys.exit(f"{name}: the matrix products of a step are {executed:,} FLOPs, counted are {products:,}")
    check_agreement("first step", found[OURS], found[PLAIN], tolerance)
    total = step_flops(model, lengths, counted)
    return {"tokens": sum(lengths), "loss_tokens": counted, "flops": total, "matrix_product_flops": products}


def measure(directory: Path, precision: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Take steps both ways in turns. Returns: what a step computes, the peaks and each step's figures."""
    optimizer = OptimizerConfig(weight_decay=WEIGHT_DECAY, weight_decay_exempt="none", max_grad_norm=MAX_NORM)
    config = BackendConfig(models={"policy": trained(directory, optimizer)}, precision=precision)  # type: ignore[arg-type]
    backend = make_backend(config, device=torch.device("cpu"), timeout_s=TIMEOUT_S)
    dtype = DTYPES[config.precision]
    model = load(directory, dtype=dtype)
    drawn = make_samples(arguments, arguments.prompt, model.config.vocab_size)
    samples = with_logprobs(drawn, backend, arguments)
    batch = (micro_batches_of(samples, arguments.budget, shares_prefixes=False), 1 / len(samples))
    ways: dict[str, Step] = {OURS: BackendLoop(backend, *batch).step, PLAIN: PlainLoop(model, *batch).step}
    counts = count_flops(ways, model, batch[0], TOLERANCES[precision])
    report: dict[str, Any] = {**counts, "micro_batches": len(batch[0])}
    report |= {"steps": {name: [] for name in ways}}
    report |= {"peaks": {name: {size: [] for size in PEAK_SIZES} for name in PRODUCTS}}
    for index in range(arguments.rounds):
        for name, multiply in PRODUCTS.items():
            for size, rates in report["peaks"][name].items():
                rates.append(flop_per_s(multiply, size, dtype))
        for name in [*ways][:: 1 if index % 2 else -1]:
            report["steps"][name].append(timed_step(ways[name]))
        if index == 0:
            least = 2 * arguments.rounds * report["flops"] / max(peaks(report).values())
            sys.stderr.write(f"{precision}: the timed steps would take {least / 60:.1f} minutes at the peak\n")
    backend.close()
    found, expected = (
        {key: [step[key] for step in report["steps"][name]] for key in ("loss", "norm")} for name in (OURS, PLAIN)
    )
    report["difference"] = check_agreement(f"{precision}, {OURS}", found, expected, TOLERANCES[precision])
    return report


def peaks(report: dict[str, Any]) -> dict[str, float]:
    """Return the FLOP/s of the best size by product."""
    return {name: max(map(statistics.median, sizes.values())) for name, sizes in report["peaks"].items()}


def medians(report: dict[str, Any]) -> dict[str, Any]:
    """Return the peaks, and by way seconds, tokens/s, FLOP/s, MFU and the ratio of plain's time to its own."""
    found = peaks(report)
    peak = max(found.values())
    table: dict[str, Any] = {"peak_flop_per_s": peak, "torch_peak_flop_per_s": found[TORCH]}
    for name, steps in report["steps"].items():
        wall_s = statistics.median(step["wall_s"] for step in steps)
        ratios = {
            key: statistics.median(
                plain[key] / own[key] for plain, own in zip(report["steps"][PLAIN], steps, strict=True)
            )
            for key in ("wall_s", "cpu_s")
        }
        table[name] = {
            "wall_s": wall_s,
            "tokens_per_s": report["tokens"] / wall_s,
            "flop_per_s": report["flops"] / wall_s,
            "mfu": report["flops"] / wall_s / peak,
            "of_torch_peak": report["flops"] / wall_s / found[TORCH],
            "plain_over_it": ratios["wall_s"],
            "plain_over_it_by_cpu": ratios["cpu_s"],
        }
    return table


def print_rows(precision: str, report: dict[str, Any], table: dict[str, Any]) -> None:
    """Print a line for each way."""
    shares = f"{report['tokens']} tokens, {report['loss_tokens']} in the loss, {report['micro_batches']} micro-batches"
    rates = f"peak {table['peak_flop_per_s'] / 1e9:.1f} GFLOP/s, torch's {table['torch_peak_flop_per_s'] / 1e9:.1f}"
    print(f"{precision}: {report['flops'] / 1e9:.1f} GFLOPs, {shares}; {rates}")
    print(f"losses and gradient norms agree within {report['difference']:.1e}")
    print(
        f"{'':20}{'step s':>9}{'tokens/s':>10}{'GFLOP/s':>9}{'MFU':>7}{'of torch':>12}{'plain / it':>12}{'by CPU':>8}"
    )
    for name in (OURS, PLAIN):
        row = table[name]
        rates = f"{row['wall_s']:9.3f}{row['tokens_per_s']:10.1f}{row['flop_per_s'] / 1e9:9.1f}{row['mfu']:7.3f}"
        rates += f"{row['of_torch_peak']:12.3f}"
        print(f"{name:20}{rates}{row['plain_over_it']:12.3f}{row['plain_over_it_by_cpu']:8.3f}")


def main() -> None:
    """Measure, check, print the results and write them."""
    run_as_trainer()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model in Hugging Face format; default: a random Qwen3")
    parser.add_argument("--precision", nargs="+", choices=list(TOLERANCES), default=list(TOLERANCES))
    for flag, (default, what) in FLAGS.items():
        parser.add_argument(f"--{flag}", type=int, default=default, help=f"{what} (default {default})")
    parser.add_argument("--json", type=Path, help="write every step's figures to this file")
    arguments = parser.parse_args()
    longest = arguments.prompt + arguments.response
    if longest > arguments.budget:
        sys.exit(f"--budget {arguments.budget}: a sample has {longest} tokens; use --budget {longest} or more")
    torch.set_num_threads(1)
    machine = {"cpus": os.cpu_count(), "load_before": os.getloadavg()[0], "torch": torch.__version__}
    figures: dict[str, Any] = {**vars(arguments), **machine, "medians": {}, "reports": {}}
    with tempfile.TemporaryDirectory() as name, no_progress_bars():
        directory = arguments.model or Path(name) / "model"
        if arguments.model is None:
            sizes = {"vocab": arguments.vocab, "hidden": arguments.hidden, "layers": arguments.layers}
            save_random_model(directory, **sizes, max_positions=2 * longest, seed=arguments.seed)
        store = StoreLocation(address="127.0.0.1", file=Path(name) / "store")
        common = {"world_size": 1, "timeout_s": TIMEOUT_S, "seed": arguments.seed, "device": "cpu"}
        init_process_group(rank=0, rendezvous=store, **common)
        for precision in arguments.precision:
            report = measure(directory, precision, arguments)
            figures["reports"][precision], figures["medians"][precision] = report, medians(report)
            print_rows(precision, report, figures["medians"][precision])
            if arguments.json:
                arguments.json.write_text(json.dumps(figures, indent=2, default=str) + "\n", encoding="utf-8")
        dist.barrier()
        destroy_process_group()


if __name__ == "__main__":
    main()
