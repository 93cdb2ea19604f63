"""Measure a trainer's step with and without shared prefixes: time and peak memory, through the trainers' backend.

    OMP_NUM_THREADS=1 python scripts/bench/shared_prefix.py [--model DIR] [--prompt 50 200 1000] [--json FILE]

In: random tokens, groups of samples of one prompt, as the coordinator cuts them into micro-batches of at most
`--budget` tokens, shared ones counted once; a random Qwen3 without --model. Out: medians of whole optimizer steps, from
NumPy arrays to updated weights, in one process with one thread; both ways take turns. Peak memory is that of the
process during another step, above what it holds before: weights, gradients and the optimizer's states are there before.
Nothing is printed of a prompt length unless losses and gradient norms agree in every step.
"""

import argparse
import ctypes
import dataclasses
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_model import save_random_model
from trainer_process import run_as_trainer
from training_loops import LOG_RATIOS, LOSS, TOLERANCES

from coati_rl.batch import MicroBatch, MiniBatch
from coati_rl.batching.packing import pack
from coati_rl.model_files.quiet import no_progress_bars
from coati_rl.samples import Sample
from consumer.backend import Backend
from consumer.backend_config import BackendConfig, trained
from consumer.objectives.policy_gradient import PolicyGradient
from consumer.optim.learning_rate import LearningRate
from consumer.parallel.single_process import SingleProcess
from consumer.train_step import TrainStep

ON, OFF = "shared", "each its own"
RATE = 0.0  # both ways take turns with the same weights, which must not move between the steps that are compared
FLAGS = {
    "prompts": (8, "prompts of an optimizer step"),
    "samples": (8, "samples of a prompt"),
    "response": (32, "tokens of a response"),
    "budget": (1280, "tokens of a micro-batch, at least those of a longest sample"),
    "rounds": (5, "timed steps of each way"),
    "seed": (0, "of weights and tokens"),
    "hidden": (256, "hidden size without --model, a multiple of 64"),
    "layers": (4, "decoder layers without --model"),
    "vocab": (8192, "vocabulary without --model"),
}


def make_samples(arguments: argparse.Namespace, num_prompt: int, vocabulary: int) -> list[Sample]:
    """Create groups of random tokens; their log-probabilities when sampled are left at 0."""
    rng = np.random.default_rng(arguments.seed)
    samples = []
    for group in range(arguments.prompts):
        prompt = rng.integers(3, vocabulary, num_prompt)
        for number in range(arguments.samples):
            samples.append(
                Sample(
                    uid=f"bench-{group}",
                    number=number,
                    prefix_ids=prompt,
                    token_ids=rng.integers(3, vocabulary, arguments.response),
                    loss_mask=np.ones(arguments.response, dtype=bool),
                    arrays={
                        "loss_weights": 1 / arguments.response,
                        # Of a mean other than 0, so that the mean loss is no small difference of large terms.
                        "advantages": 0.5 + float(rng.normal()),
                        "rollout_logprobs": np.zeros(arguments.response, dtype=np.float32),
                        "temperature": 1.0,
                        "policy_version": np.zeros(arguments.response, dtype=np.int32),
                    },
                )
            )
    return samples


def with_logprobs(samples: Sequence[Sample], backend: Backend, arguments: argparse.Namespace) -> list[Sample]:
    """Return the samples with log-probabilities at fixed distances from the model's."""
    rng, found = np.random.default_rng(arguments.seed), list(samples)
    micro_batches = micro_batches_of(samples, arguments.budget, shares_prefixes=True)
    for micro_batch, score in zip(micro_batches, backend.score(micro_batches), strict=True):
        of_sample = micro_batch.loss_arrays["sample_index"]
        for index in np.unique(of_sample[of_sample >= 0]).tolist():
            own = score.float().numpy()[of_sample == index]
            rollout = (own - rng.choice(LOG_RATIOS, len(own))).astype(np.float32)
            arrays = {**samples[index].arrays, "rollout_logprobs": rollout}
            found[index] = dataclasses.replace(samples[index], arrays=arrays)
    return found


def micro_batches_of(samples: Sequence[Sample], budget: int, *, shares_prefixes: bool) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of an optimizer step, bounded by tokens alone."""
    return pack(samples, max_samples=len(samples), max_tokens=budget, shares_prefixes=shares_prefixes)[0]


def memory_mib(field: str) -> float:
    """Return VmRSS (now) or VmHWM (the peak) of this process."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    if found is None:
        sys.exit(f"/proc/self/status has no {field}")
    return int(found[1]) / 1024


def timed_step(train_step: TrainStep, batch: MiniBatch) -> dict[str, float]:
    """Take an optimizer step. Returns: its seconds, CPU seconds, loss and gradient norm."""
    wall, cpu = time.perf_counter(), time.process_time()
    metrics = train_step.run(batch) or {}
    return {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "loss": metrics["loss"],
        "norm": metrics["grad_norm"],
    }


def peak_mib(train_step: TrainStep, batch: MiniBatch) -> float:
    """Take an optimizer step in a heap that holds nothing free. Returns: MiB at its peak, above those before it."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # forget the peak
    held = memory_mib("VmRSS")
    train_step.run(batch)
    return memory_mib("VmHWM") - held


def measure(backend: Backend, num_prompt: int, vocabulary: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Take steps both ways in turns. Returns: by way, its tokens and micro-batches, and each step's figures."""
    samples = with_logprobs(make_samples(arguments, num_prompt, vocabulary), backend, arguments)
    report: dict[str, Any] = {}
    batches = {}
    for way in (OFF, ON):
        micro_batches = micro_batches_of(samples, arguments.budget, shares_prefixes=way == ON)
        report[way] = {
            "tokens": sum(m.num_tokens for m in micro_batches),
            "micro_batches": len(micro_batches),
            "steps": [],
        }
        batches[way] = MiniBatch(
            step=0,
            micro_batches=micro_batches,
            is_last=True,
            loss_scale=1 / len(samples),
            learning_rate_progress=0.0,
        )
    train_step = TrainStep(backend, PolicyGradient(loss=LOSS), learning_rate=LearningRate(peak=RATE))
    timed_step(train_step, batches[ON])  # memory is allocated
    for way, batch in batches.items():
        report[way]["peak_mib"] = peak_mib(train_step, batch)
    for _ in range(arguments.rounds):
        for way, batch in batches.items():
            report[way]["steps"].append(timed_step(train_step, batch))
    return report


def check_agreement(name: str, report: dict[str, Any], tolerance: float) -> float:
    """Return the largest relative difference of losses and norms. Raises: SystemExit if it is too large, or NaN."""
    pairs = zip(report[ON]["steps"], report[OFF]["steps"], strict=True)
    worst = float(np.max([abs(on[key] / off[key] - 1) for on, off in pairs for key in ("loss", "norm")]))
    if not worst <= tolerance:
        sys.exit(f"{name}: a loss or gradient norm differs by {worst:.2e}: not the same computation")
    return worst


def print_row(name: str, report: dict[str, Any]) -> dict[str, float]:
    """Print and return the medians of both ways and their ratios."""
    medians = {
        f"{key} {way}": statistics.median(step[key] for step in report[way]["steps"])
        for way in (OFF, ON)
        for key in ("wall_s", "cpu_s")
    }
    medians |= {f"peak_mib {way}": report[way]["peak_mib"] for way in (OFF, ON)}
    row = {
        "tokens_ratio": report[OFF]["tokens"] / report[ON]["tokens"],
        "wall_ratio": medians[f"wall_s {OFF}"] / medians[f"wall_s {ON}"],
        "cpu_ratio": medians[f"cpu_s {OFF}"] / medians[f"cpu_s {ON}"],
        **medians,
    }
    print(
        f"{name:18}{row[f'wall_s {OFF}']:10.2f}{row[f'wall_s {ON}']:10.2f}{row['wall_ratio']:8.2f}"
        f"{row['cpu_ratio']:8.2f}{row['tokens_ratio']:8.2f}{row[f'peak_mib {OFF}']:10.0f}{row[f'peak_mib {ON}']:10.0f}"
        f"{report[OFF]['micro_batches']:7}{report[ON]['micro_batches']:5}",
        flush=True,
    )
    return row


def main() -> None:
    """Measure, check, print the results and write them."""
    run_as_trainer()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model directory; without it a random Qwen3")
    parser.add_argument("--prompt", type=int, nargs="+", default=[50, 200, 1000], help="tokens of a prompt")
    parser.add_argument("--precision", nargs="+", choices=list(TOLERANCES), default=list(TOLERANCES))
    for flag, (default, what) in FLAGS.items():
        parser.add_argument(f"--{flag}", type=int, default=default, help=f"{what} (default {default})")
    parser.add_argument("--json", type=Path, help="write every step's figures to this file")
    arguments = parser.parse_args()
    longest = max(arguments.prompt) + arguments.response
    if longest > arguments.budget:
        sys.exit(f"--budget {arguments.budget}: a sample has {longest} tokens; use --budget {longest} or more")
    torch.set_num_threads(1)
    figures: dict[str, Any] = {
        **vars(arguments),
        "cpus": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "torch": torch.__version__,
        "reports": {},
        "medians": {},
    }
    columns = ("off s", 10), ("on s", 10), ("ratio", 8), ("by CPU", 8), ("tokens", 8), ("off MiB", 10), ("on MiB", 10)
    print(" " * 18 + "".join(f"{title:>{width}}" for title, width in columns) + "  micro-batches")
    with tempfile.TemporaryDirectory() as directory, no_progress_bars():
        if arguments.model is None:
            save_random_model(
                Path(directory),
                vocab=arguments.vocab,
                hidden=arguments.hidden,
                layers=arguments.layers,
                max_positions=2 * longest,
                tied=True,
                seed=arguments.seed,
            )
        for precision in arguments.precision:
            settings = BackendConfig(
                models={"policy": trained(arguments.model or Path(directory))}, precision=precision
            )
            backend = Backend(settings, SingleProcess(device=torch.device("cpu")))
            vocabulary = backend.policy.module.config.vocab_size
            for num_prompt in arguments.prompt:
                name = f"{precision}, {num_prompt} + {arguments.response}"
                report = measure(backend, num_prompt, vocabulary, arguments)
                report["difference"] = check_agreement(name, report, TOLERANCES[precision])
                figures["reports"][name] = report
                figures["medians"][name] = print_row(name, report)
                if arguments.json:  # after each, as the long ones take their time
                    arguments.json.write_text(json.dumps(figures, indent=2, default=str) + "\n", encoding="utf-8")
            backend.close()


if __name__ == "__main__":
    main()
