"""Measure trainer tokens/s on a CPU: the trainers' backend (hybrid) against a hand-written loop with transformers.

    OMP_NUM_THREADS=1 python scripts/bench/trainer.py [--rounds 7] [--layout dp2 tp2] [--json FILE]

In: a random Qwen3 and packed micro-batches of lognormal lengths, the same for all. Out: medians of whole optimizer
steps, from NumPy arrays to updated weights, one thread per process; the loops take turns. The hand-written loop runs
twice: with transformers' default, where SDPA gets a block-diagonal mask, and with our attention; ours is compared with
the faster one. It computes logits of loss tokens only, and reports only loss and norm. Nothing is printed unless losses
and gradient norms agree in every step. Layouts with several processes, over loopback, are measured afterwards.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from random_model import save_random_model
from training_loops import (
    LOG_RATIOS,
    MAX_NORM,
    TOLERANCES,
    WEIGHT_DECAY,
    BackendLoop,
    PlainLoop,
    check_agreement,
    load,
)
from transformers import PreTrainedModel

from coati_rl.batching.packing import pack
from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.model_files.quiet import no_progress_bars
from coati_rl.samples import Sample
from consumer.backend import make_backend
from consumer.backend_config import BackendConfig, trained
from consumer.models import packed_attention
from consumer.parallel.process_group import destroy_process_group, init_process_group
from consumer.parallel.store_location import StoreLocation

MU, SIGMA, LONGEST = 4.2, 0.8, 512  # lengths of prompt and response together
PROMPT_SHARE = 0.25
TEMPERATURE = 0.8
TIMEOUT_S = 300.0
OURS, PLAIN, PLAIN_PACKED = "hybrid", "plain, SDPA and mask", "plain, our attention"
# One optimizer step over all micro-batches: the mean loss, and the gradient's norm before clipping.
Step = Callable[[], tuple[float, float]]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # processes, and settings of the backend
    "dp1": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tp_size": 2}),
    "pp2": (2, {"pp_size": 2}),
    "cp2": (2, {"cp_size": 2}),
    "dp2_bf16": (2, {"precision": "bf16"}),
    "zero1_dp2": (2, {"zero_stage": 1, "precision": "bf16"}),  # ColossalAI's ZeRO does not support float32
}
FLAGS = {
    "hidden": (256, "hidden size, a multiple of 64"),
    "layers": (4, "decoder layers"),
    "vocab": (8192, "vocabulary"),
    "samples": (40, "samples of an optimizer step"),
    "budget": (1024, "tokens of a micro-batch"),
    "length": (0, "tokens of every sample; 0: lognormal lengths"),
    "rounds": (7, "timed steps of each loop"),
    "seed": (0, "of weights, lengths and tokens"),
}


def make_samples(arguments: argparse.Namespace, model: PreTrainedModel) -> Iterator[Sample]:
    """Yield samples whose log-probabilities have fixed distances from the model's."""
    rng = np.random.default_rng(arguments.seed)
    lengths = rng.lognormal(MU, SIGMA, arguments.samples).round().clip(4, min(LONGEST, arguments.budget))
    for number, length in enumerate(np.full(arguments.samples, arguments.length or lengths).astype(int)):
        token_ids = rng.integers(0, arguments.vocab, length)
        start = max(1, int(PROMPT_SHARE * length))
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(token_ids)[None]).logits[0, :-1] / TEMPERATURE
        own = -F.cross_entropy(logits, torch.from_numpy(token_ids[1:]), reduction="none").numpy()
        rollout = np.append(0.0, own - rng.choice(LOG_RATIOS, length - 1))
        yield Sample(
            uid=f"bench-{number}",
            number=0,
            prefix_ids=token_ids[:start],
            token_ids=token_ids[start:],
            loss_mask=np.ones(length - start, dtype=bool),
            arrays={
                **{"loss_weights": 1.0, "advantages": rng.normal(), "temperature": TEMPERATURE},
                "rollout_logprobs": rollout[start:].astype(np.float32),
                "policy_version": np.zeros(length - start, dtype=np.int32),
            },
        )


def measure(steps: Mapping[str, Step], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Measure wall_s, cpu_s, loss and norm of every step by loop; the first, which allocates memory, is not timed."""
    names = list(steps)
    series: dict[str, dict[str, list[float]]] = {n: {k: [] for k in ("wall_s", "cpu_s", "loss", "norm")} for n in names}
    for index in range(rounds + 1):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            loss, norm = steps[name]()
            times = {"wall_s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu_start}
            for key, value in {**(times if index else {}), "loss": loss, "norm": norm}.items():
                series[name][key].append(value)
    return series


def run_rank(rank: int, layout: str, rendezvous: StoreLocation, directory: Path, arguments: argparse.Namespace) -> None:
    """Run one rank of a layout; the last rank, which always has the LM head, writes its results to LAYOUT.json."""
    torch.set_num_threads(1)
    num_processes, settings = LAYOUTS[layout]
    device = init_process_group(
        rank=rank, world_size=num_processes, rendezvous=rendezvous, timeout_s=TIMEOUT_S, seed=0, device="cpu"
    )
    with no_progress_bars():
        samples = list(make_samples(arguments, load(directory)))
        optimizer = OptimizerConfig(weight_decay=WEIGHT_DECAY, weight_decay_exempt="none", max_grad_norm=MAX_NORM)
        config = BackendConfig(models={"policy": trained(directory, optimizer)}, **settings)
        backend = make_backend(config, device=device, timeout_s=TIMEOUT_S)
        limits = {"max_samples": len(samples), "max_tokens": arguments.budget}
        share = pack(samples, num_ranks=backend.layout.num_data_ranks, **limits)[backend.layout.data_rank]
        batch = (share, 1 / sum(sample.num_loss_tokens for sample in samples))
        steps: dict[str, Step] = {OURS: BackendLoop(backend, *batch).step}
        if layout == "dp1":
            steps[PLAIN] = PlainLoop(load(directory), *batch).step
            steps[PLAIN_PACKED] = PlainLoop(load(directory, packed_attention.NAME), *batch).step
    series = measure(steps, arguments.rounds)
    if rank == num_processes - 1:
        report = {"tokens": sum(map(len, samples)), "micro_batches": len(batch[0]), "series": series}
        (directory / f"{layout}.json").write_text(json.dumps(report), encoding="utf-8")
    dist.barrier()
    backend.close()
    destroy_process_group()


def run_layout(layout: str, directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all ranks of a layout. Returns: the last rank's results."""
    context = multiprocessing.get_context("spawn")
    rendezvous = StoreLocation(address="127.0.0.1", file=directory / f"{layout}.store")
    common = (layout, rendezvous, directory, arguments)
    processes = [
        context.Process(target=run_rank, args=(rank, *common), daemon=True) for rank in range(LAYOUTS[layout][0])
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(f"{layout}: a process failed")
    return dict(json.loads((directory / f"{layout}.json").read_text(encoding="utf-8")))


def medians(report: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return wall-clock and CPU seconds per step, and tokens/s, by loop."""
    table = {}
    for name, series in report["series"].items():
        wall_s, cpu_s = (statistics.median(series[key]) for key in ("wall_s", "cpu_s"))
        table[name] = {"wall_s": wall_s, "cpu_s": cpu_s, "tokens_per_s": report["tokens"] / wall_s}
    return table


def print_comparison(table: Mapping[str, Mapping[str, float]]) -> None:
    """Print each loop's medians, and the ratio of our tokens/s to its."""
    print(f"{'median of a step':24}{'wall s':>9}{'CPU s':>9}{'tokens/s':>10}{'ours / it':>10}{'by CPU':>10}")
    for name, row in table.items():
        ratios = "".join(f"{row[key] / table[OURS][key]:10.3f}" for key in ("wall_s", "cpu_s"))
        print(f"{name:24}{row['wall_s']:9.3f}{row['cpu_s']:9.3f}{row['tokens_per_s']:10.0f}{ratios}")


def main() -> None:
    """Measure, check, print the results and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, (default, what) in FLAGS.items():
        parser.add_argument(f"--{flag}", type=int, default=default, help=f"{what} (default {default})")
    parser.add_argument("--tied", action="store_true", help="LM head and embedding are one")
    parser.add_argument("--layout", nargs="+", choices=list(LAYOUTS), default=["dp1"], help="dp1 is always measured")
    parser.add_argument("--json", type=Path, help="write every step's figures to this file")
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        sys.exit("this measures CPUs: set CUDA_VISIBLE_DEVICES to nothing")
    layouts = ["dp1", *(name for name in dict.fromkeys(arguments.layout) if name != "dp1")]
    machine = {"cpus": os.cpu_count(), "load_before": os.getloadavg()[0], "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as directory, no_progress_bars():
        save_random_model(
            Path(directory),
            vocab=arguments.vocab,
            hidden=arguments.hidden,
            layers=arguments.layers,
            max_positions=max(2 * LONGEST, arguments.length),
            tied=arguments.tied,
            seed=arguments.seed,
        )
        reports = {layout: run_layout(layout, Path(directory), arguments) for layout in layouts}
    expected, worst = reports["dp1"]["series"][PLAIN], {"fp32": 0.0, "bf16": 0.0}
    for layout, report in reports.items():
        precision = LAYOUTS[layout][1].get("precision", "fp32")
        for name, series in report["series"].items():
            difference = check_agreement(f"{layout}, {name}", series, expected, TOLERANCES[precision])
            worst[precision] = max(worst[precision], difference)
    tables = {layout: medians(report) for layout, report in reports.items()}
    print(f"{reports['dp1']['tokens']} tokens in {reports['dp1']['micro_batches']} micro-batches per step")
    print(f"losses and gradient norms agree, at worst within {worst['fp32']:.1e} (fp32), {worst['bf16']:.1e} (bf16)")
    print_comparison(tables["dp1"])
    for layout in layouts[1:]:
        rate, of_dp1 = (tables[name][OURS]["tokens_per_s"] for name in (layout, "dp1"))
        print(f"{layout:24}{rate:28.0f}  {rate / of_dp1:.3f} of dp1's, on {os.cpu_count()} CPUs")
    if arguments.json:
        figures = {**vars(arguments), **machine, "differences": worst, "medians": tables, "reports": reports}
        arguments.json.write_text(json.dumps(figures, indent=2, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
