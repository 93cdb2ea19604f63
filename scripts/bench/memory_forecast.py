"""Compare the memory forecast of `--dry-run` with the measured peak of a trainer's step, by layout.

    OMP_NUM_THREADS=1 python scripts/bench/memory_forecast.py [--model DIR] [--budget 512] [--json FILE]

In: groups of samples of one prompt, each group as many tokens as `--budget`, shared ones once; a random Qwen3 without
--model. Out: for each layout that the model allows the largest rank's peak during optimizer steps through the trainers'
backend, from NumPy arrays to updated weights, each rank in a fresh process with one thread and the environment of a
run's trainers; and the forecast of the same sizes, by its parts. The peak is the kernel's high-water mark of the
process, without mapped files (the weights' file, libraries) and without what the process held before it loaded the
model; `held` is what there is of it between two steps. The first step, which allocates the optimizer's states, is not
measured. --critic: PPO's step, of a policy and a critic. The seconds are the median of the measured steps of the rank
with the largest peak.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from random_model import save_random_model
from shared_prefix import RATE, make_samples
from training_loops import LOSS

from coati_rl.algorithms.gae import TokenReturns
from coati_rl.algorithms.value_loss import ValueLoss
from coati_rl.batch import MicroBatch, MiniBatch
from coati_rl.batching.packing import pack
from coati_rl.config.cli import build_config
from coati_rl.errors import ConfigError
from coati_rl.memory.activations import MicroBatchSize
from coati_rl.memory.adapters import adapter_shape, shares_base
from coati_rl.memory.context import context_share, gathered_key_bytes
from coati_rl.memory.model_shape import model_shape
from coati_rl.memory.trainer import Parts, TrainerLayout, trained_bytes, trainer_parts
from coati_rl.model_files.adapter_files import AdapterSpec
from coati_rl.model_files.quiet import no_progress_bars
from coati_rl.preflight.resources import read_model_config
from coati_rl.protocols import Role
from consumer.adapters.adapters import AdapterSource
from consumer.backend import make_backend
from consumer.backend_config import BackendConfig, ModelSource, trained
from consumer.environment import memory_environment
from consumer.models.scalar_head import ScalarHead
from consumer.objectives.actor_critic import ActorCritic
from consumer.objectives.objective import Objective
from consumer.objectives.policy_gradient import PolicyGradient
from consumer.optim.learning_rate import LearningRate
from consumer.parallel.layout_rules import check_layout
from consumer.parallel.process_group import destroy_process_group, init_process_group
from consumer.parallel.store_location import StoreLocation
from consumer.train_step import TrainStep

TIMEOUT_S = 300.0
MIB = 2**20
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # processes, and settings of the backend
    "dp1": (1, {}),
    "tp2": (2, {"tp_size": 2}),
    "fsdp2": (2, {"plugin": "fsdp2"}),
    "fsdp2_tp2": (4, {"plugin": "fsdp2", "tp_size": 2}),
    "fsdp2_copies2": (4, {"plugin": "fsdp2", "fsdp_size": 2}),
    "dp2": (2, {}),
    "cp2": (2, {"cp_size": 2}),
    "ep2": (2, {"plugin": "fsdp2", "ep_size": 2}),
    "dp1_bf16": (1, {"precision": "bf16"}),
    "zero1_bf16": (2, {"zero_stage": 1, "precision": "bf16"}),
}
FLAGS = {
    "prompts": (4, "prompts of an optimizer step and data-parallel rank, each a micro-batch"),
    "samples": (4, "samples of a prompt"),
    "budget": (512, "tokens of a micro-batch"),
    "hidden": (384, "hidden size without --model, a multiple of 64"),
    "layers": (6, "decoder layers without --model"),
    "vocab": (12288, "vocabulary without --model"),
    "seed": (0, "of weights and tokens"),
    "num-experts": (0, "experts of a layer without --model; 0: a dense model"),
    "steps": (3, "measured optimizer steps"),
    "lora-rank": (0, "of adapters of all linear layers, in place of the weights; 0: the weights are trained"),
}


def prompt_tokens(arguments: argparse.Namespace) -> int:
    """Return the tokens of a prompt: an eighth of the budget or a little more, so that responses fill the rest."""
    return arguments.budget // 8 + (arguments.budget - arguments.budget // 8) % arguments.samples


def forecast(directory: Path, layout: str, arguments: argparse.Namespace) -> Parts:
    """Return the forecast of the largest rank."""
    num_processes, settings = LAYOUTS[layout]
    tp, prompt = settings.get("tp_size", 1), prompt_tokens(arguments)
    size = MicroBatchSize(
        tokens=arguments.budget,
        loss_tokens=arguments.budget - prompt,
        path_tokens=arguments.budget - prompt + arguments.samples * prompt,
        longest=prompt + (arguments.budget - prompt) // arguments.samples,
    )
    trainers = TrainerLayout(
        precision=settings.get("precision", "fp32"),
        plugin=settings.get("plugin", "hybrid"),
        dp=settings.get("fsdp_size") or num_processes // tp,
        ep=settings.get("ep_size", 1),
        fsdp_copies=num_processes // tp // settings.get("fsdp_size", num_processes // tp),
        zero_stage=settings.get("zero_stage", 0),
        gradient_checkpointing=arguments.checkpointing,
        has_several_micro_batches=arguments.prompts > 1,
    )
    config = read_model_config(directory)
    if spec := adapter_spec(arguments):
        is_shared = tp == 1 and shares_base(config, trainers.precision, "cpu", trainers.plugin)
        adapters = adapter_shape(
            config, spec, tensor_parallel_size=tp, is_base_shared=is_shared, is_quantized=arguments.load_in_4bit
        )
        trainers = replace(trainers, adapters=adapters)
    shape, cp = model_shape(config, tensor_parallel_size=tp), settings.get("cp_size", 1)
    gathered = gathered_key_bytes(shape, size, cp, trainers.device)
    trainers, size = replace(trainers, gathered_keys=gathered), context_share(size, cp)
    parts = trainer_parts(shape, size, trainers)
    parts = {name: count for name, count in parts.items() if shape.is_known or name != "activations"}
    if arguments.critic:
        critic = model_shape(config, tensor_parallel_size=tp, has_scalar_head=True)
        parts["critic"] = trained_bytes(critic, size, trainers)
    return parts


def adapter_spec(arguments: argparse.Namespace) -> AdapterSpec | None:
    """Return the adapters that are trained; None: the weights are."""
    rank = arguments.lora_rank
    return AdapterSpec(rank=rank, alpha=2.0 * rank, targets=("all-linear",)) if rank else None


def refusal(directory: Path, layout: str) -> str | None:
    """Return why the model cannot be trained in this layout; None if it can."""
    num_processes, settings = LAYOUTS[layout]
    sizes: dict[str, Any] = {"num_trainers": num_processes, "plugin": settings.get("plugin", "hybrid")}
    sizes["tensor_parallel_size"] = settings.get("tp_size", 1)
    sizes |= {"context_parallel_size": settings.get("cp_size", 1), "expert_parallel_size": settings.get("ep_size", 1)}
    try:
        check_layout(build_config({"model": str(directory), **sizes}), read_model_config(directory))
    except ConfigError as error:
        return str(error)
    return None


def with_rewards(micro_batch: MicroBatch) -> MicroBatch:
    """Return it with the reward 1 at each token, for a critic."""
    rewards = micro_batch.loss_arrays["loss_mask"].astype(np.float32)
    return micro_batch.with_arrays(token_rewards=rewards, is_cut=np.zeros_like(rewards))


def memory_kib(*fields: str) -> int:
    """Return the sum of these fields of this process's status."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return sum(int(re.findall(rf"{field}:\s+(\d+) kB", status)[0]) for field in fields)


def backend_config(model: Path, settings: Mapping[str, Any], arguments: argparse.Namespace) -> BackendConfig:
    """Return what is trained: weights or adapters, and a critic beside them if one is asked for."""
    spec = adapter_spec(arguments)
    adapters = None if spec is None else AdapterSource(spec=spec, base=str(model), has_four_bits=arguments.load_in_4bit)
    models: dict[Role, ModelSource] = {"policy": trained(model, adapters=adapters)}
    if arguments.critic:
        models["value"] = trained(model, head=ScalarHead(seed=None, pad_token_id=0), adapters=adapters)
    return BackendConfig(models=models, gradient_checkpointing=arguments.checkpointing, **settings)


def run_rank(
    rank: int, layout: str, rendezvous: StoreLocation, model: Path, directory: Path, arguments: argparse.Namespace
) -> None:
    """Take optimizer steps on one rank of a layout, and write its peak in bytes to LAYOUT-RANK.json."""
    torch.set_num_threads(1)
    num_processes, settings = LAYOUTS[layout]
    device = init_process_group(
        rank=rank, world_size=num_processes, rendezvous=rendezvous, timeout_s=TIMEOUT_S, seed=0, device="cpu"
    )
    import consumer.parallel.fsdp
    import consumer.parallel.hybrid  # noqa: F401  (libraries, before what they hold is read)

    libraries = memory_kib("RssAnon")
    with no_progress_bars():
        backend = make_backend(backend_config(model, settings, arguments), device=device, timeout_s=TIMEOUT_S)
    dp, dp_rank = backend.layout.num_data_ranks, backend.layout.data_rank
    groups = argparse.Namespace(**{**vars(arguments), "prompts": arguments.prompts * dp})
    groups.response = (arguments.budget - prompt_tokens(arguments)) // arguments.samples
    samples = make_samples(groups, prompt_tokens(arguments), backend.policy.module.config.vocab_size)
    share = pack(samples, num_ranks=dp, max_samples=len(samples), max_tokens=arguments.budget, shares_prefixes=True)
    batch = MiniBatch(
        step=0,
        micro_batches=tuple(with_rewards(each) if arguments.critic else each for each in share[dp_rank]),
        is_last=True,
        loss_scale=1 / len(samples),
        learning_rate_progress=0.0,
    )
    objective: Objective = PolicyGradient(loss=LOSS)
    if arguments.critic:
        objective = ActorCritic(loss=LOSS, value_loss=ValueLoss(clip=0.2), token_returns=TokenReturns())
    train_step = TrainStep(backend, objective, learning_rate=LearningRate(peak=RATE))
    train_step.run(batch)
    peak, seconds = 0, list[float]()
    for _ in range(arguments.steps):
        dist.barrier()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        held = memory_kib("RssAnon")
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # forget the peak
        begin = time.perf_counter()
        train_step.run(batch)
        seconds.append(time.perf_counter() - begin)
        peak = max(peak, memory_kib("VmHWM") - memory_kib("RssFile", "RssShmem"))
    report = {
        "peak": 1024 * (peak - libraries),
        "held": 1024 * (held - libraries),
        "step_s": statistics.median(seconds),
        "tokens": max(m.num_tokens for m in share[dp_rank]),
        "micro_batches": len(share[dp_rank]),
    }
    (directory / f"{layout}-{rank}.json").write_text(json.dumps(report), encoding="utf-8")
    dist.barrier()
    backend.close()
    destroy_process_group()


def measure(layout: str, model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all ranks of a layout. Returns: the report of the rank with the largest peak."""
    context = multiprocessing.get_context("spawn")
    os.environ.update(memory_environment("cpu", LAYOUTS[layout][1].get("plugin", "hybrid")))  # of the ranks' processes
    ranks = range(LAYOUTS[layout][0])
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        common = (layout, StoreLocation(address="127.0.0.1", file=directory / "store"), model, directory, arguments)
        processes = [context.Process(target=run_rank, args=(rank, *common), daemon=True) for rank in ranks]
        for act in (context.Process.start, context.Process.join):
            for process in processes:
                act(process)
        if any(process.exitcode for process in processes):
            sys.exit(f"{layout}: a process failed")
        reports = [json.loads((directory / f"{layout}-{rank}.json").read_text(encoding="utf-8")) for rank in ranks]
    return dict(max(reports, key=lambda report: report["peak"]))


def main() -> None:
    """Measure, compare, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model directory; without it a random Qwen3")
    parser.add_argument("--layout", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--critic", action="store_true", help="train a critic beside the policy: PPO's step")
    parser.add_argument("--load-in-4bit", action="store_true", help="with --lora-rank: 4-bit base (hybrid, not tp)")
    parser.add_argument("--untied", action="store_true", help="LM head and embedding are two, without --model")
    for flag, (default, what) in FLAGS.items():
        parser.add_argument(f"--{flag}", type=int, default=default, help=f"{what} (default {default})")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        sys.exit("this measures CPUs: set CUDA_VISIBLE_DEVICES to nothing")
    figures: dict[str, Any] = {**vars(arguments), "torch": torch.__version__, "cpus": os.cpu_count(), "layouts": {}}
    print(f"{'MiB':12}{'measured':>10}{'held':>8}{'forecast':>10}{'ratio':>8}{'step, s':>8}  parts of the forecast")
    with tempfile.TemporaryDirectory() as name, no_progress_bars():
        model = arguments.model or Path(name)
        if arguments.model is None:
            save_random_model(
                model,
                vocab=arguments.vocab,
                hidden=arguments.hidden,
                layers=arguments.layers,
                max_positions=2 * arguments.budget,
                tied=not arguments.untied,
                num_experts=arguments.num_experts,
                seed=arguments.seed,
            )
        for layout in arguments.layout:
            if reason := refusal(model, layout):
                figures["layouts"][layout] = {"refused": reason}
                print(f"{layout:12}refused: {reason}")
                continue
            report = measure(layout, model, arguments)
            parts = forecast(model, layout, arguments)
            ratio = sum(parts.values()) / report["peak"]
            figures["layouts"][layout] = {**report, "forecast": parts, "ratio": ratio}
            shown = ", ".join(f"{part} {count / MIB:.0f}" for part, count in parts.items())
            sizes = f"{report['peak'] / MIB:10.0f}{report['held'] / MIB:8.0f}{sum(parts.values()) / MIB:10.0f}"
            print(f"{layout:12}{sizes}{ratio:8.2f}{report['step_s']:8.2f}  {shown}")
            if report["tokens"] != arguments.budget:
                sys.exit(f"{layout}: the largest micro-batch has {report['tokens']} tokens, not {arguments.budget}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
