"""Measure the MFU of an optimizer step on packed rows, in bfloat16 with float32 masters, through the trainers' backend.

    python scripts/bench/mfu.py --device cuda [--quick] [--peak-tflops 989.4] [--json FILE]

A Qwen2 with random weights takes whole optimizer steps on ten samples with 16,384 tokens in total; the largest shape
that fits into memory is used, with or without gradient checkpointing. T tokens, T' of them counted by the loss, t of a
sample, A heads x head size.

    FLOPs = 6 N T + 6 V H T' + 6 A sum(t^2) * layers

N are the weights of all matrix products except the LM head's, V H, which is applied to loss tokens only; causal
attention has t^2 / 2 pairs with 2 A multiply-adds each; the backward counts twice. Recomputation by gradient
checkpointing, the embedding, norms and the optimizer do not count. MFU is the FLOPs' fraction of the GPU's dense
bfloat16 peak in NVIDIA's datasheets (half of the peak "with sparsity").
"""

import argparse
import gc
import json
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.batch import MicroBatch, MiniBatch
from coati_rl.batching.packing import pack
from coati_rl.model_files.quiet import no_progress_bars
from coati_rl.samples import Sample
from consumer.backend import Backend
from consumer.backend_config import BackendConfig, trained
from consumer.parallel.single_process import SingleProcess

# Full names as the driver reports them: laptop and export variants are other chips, a MIG slice is a part of one.
PEAK_TFLOPS = {
    r"NVIDIA H100( \d+GB HBM3)?|NVIDIA H200|NVIDIA GH200 \d+GB": 989.4,
    r"NVIDIA H100 PCIe": 756.0,
    r"NVIDIA H[12]00 NVL": 835.5,
    r"NVIDIA B200": 2250.0,
    r"(NVIDIA )?A100[- ](SXM4|PCIE|\d+GB).*": 312.0,
}
# As published in their config.json: https://huggingface.co/Qwen/Qwen2-0.5B and Qwen2-1.5B; tiny is for a CPU.
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SHAPES = {
    "qwen2-1.5b": (151936, 1536, 8960, 28, 12),
    "qwen2-0.5b": (151936, 896, 4864, 24, 14),
    "tiny": (512, 64, 128, 2, 4),
}
KEY_VALUE_HEADS = 2
ATTEMPTS = [("qwen2-1.5b", False), ("qwen2-1.5b", True), ("qwen2-0.5b", False), ("qwen2-0.5b", True)]
LENGTHS = [4096, 3072, 2048, 2048, 1536, 1024, 1024, 768, 512, 256]  # of the samples: prompt and response
PROMPT_SHARE = 0.25
NUM_WARM_UP = 2  # steps in which memory is allocated


def make_backend(
    shape: str, device: torch.device, *, gradient_checkpointing: bool = False, compile_ops: bool | None = None
) -> Backend:
    """Create a random model in bfloat16 on the device."""
    sizes = dict(zip(SIZES, SHAPES[shape], strict=True)) | {"num_key_value_heads": KEY_VALUE_HEADS}
    wide = 0.1 if shape == "tiny" else 0.02  # otherwise attention would hardly affect such a narrow model
    config = Qwen2Config(**sizes, max_position_embeddings=32768, initializer_range=wide, tie_word_embeddings=True)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as name, no_progress_bars():
        model.save_pretrained(name)
        del model
        settings = BackendConfig(
            models={"policy": trained(Path(name))},
            precision="bf16",
            gradient_checkpointing=gradient_checkpointing,
            compile_ops=compile_ops,
        )
        return Backend(settings, SingleProcess(device=device))


def make_samples(lengths: Sequence[int], vocabulary: int) -> list[Sample]:
    """Create random tokens, a quarter of each sample as its prompt."""
    rng = np.random.default_rng(0)
    samples = []
    for number, length in enumerate(lengths):
        start = max(1, int(PROMPT_SHARE * length))
        token_ids = rng.integers(0, vocabulary, length)
        samples.append(
            Sample(
                uid=f"sample-{number}",
                number=0,
                prefix_ids=token_ids[:start],
                token_ids=token_ids[start:],
                loss_mask=np.ones(length - start, dtype=bool),
                arrays={
                    "loss_weights": 1.0,
                    "advantages": rng.normal(),
                    "rollout_logprobs": np.zeros(length - start, dtype=np.float32),
                    "temperature": 1.0,
                    "policy_version": np.zeros(length - start, dtype=np.int32),
                },
            )
        )
    return samples


def take_step(backend: Backend, micro_batch: MicroBatch, step: int, *, num_ranks: int = 1) -> float:
    """Take a whole optimizer step; all ranks have the same micro-batch. Returns: this rank's part of the mean loss."""
    scale = 1 / int(micro_batch.loss_arrays["loss_mask"].sum()) / num_ranks
    batch = MiniBatch(
        step=step, micro_batches=(micro_batch,), is_last=True, loss_scale=scale, learning_rate_progress=0.0
    )
    sums = backend.forward_backward(batch, PolicyLoss())
    backend.optimizer_step(loss_scale=scale, learning_rate=1e-6)
    return float(sums["loss_sum"]) * scale


def step_flops(
    model: PreTrainedModel, lengths: Sequence[int], counted_tokens: int, *, with_attention: bool = True
) -> int:
    """Return the FLOPs of a step as defined in the module's docstring."""
    head, config = model.get_output_embeddings(), model.config
    products = [module for module in model.modules() if isinstance(module, torch.nn.Linear) and module is not head]
    weights = sum(module.weight.numel() for module in products)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    squares = sum(t * t for t in lengths) if with_attention else 0
    attention = config.num_attention_heads * head_size * config.num_hidden_layers * squares
    return 6 * (weights * sum(lengths) + head.weight.numel() * counted_tokens + attention)


def measure(backend: Backend, lengths: Sequence[int], rounds: int, peak_tflops: float | None) -> dict[str, Any]:
    """Time whole optimizer steps on one packed row."""
    device, vocabulary = backend.device, int(backend.policy.module.config.vocab_size)
    samples = make_samples(lengths, vocabulary)
    (micro_batch,) = pack(samples, max_samples=len(samples))[0]
    micro_batch = micro_batch.with_arrays(rollout_logprobs=backend.score([micro_batch])[0].cpu().numpy())
    seconds, losses = [], []
    for step in range(NUM_WARM_UP + rounds):
        _synchronize(device)
        begin = time.perf_counter()
        losses.append(take_step(backend, micro_batch, step))
        _synchronize(device)
        seconds.append(time.perf_counter() - begin)
    if not np.isfinite(losses).all():
        raise SystemExit(f"losses are not finite: {losses}")
    step_s = statistics.median(seconds[NUM_WARM_UP:])
    counted = sum(sample.num_loss_tokens for sample in samples)
    tflops = step_flops(backend.policy.module, lengths, counted) / step_s / 1e12
    return {
        "tokens": sum(lengths),
        "counted_tokens": counted,
        "step_s": step_s,
        "tokens_per_s": sum(lengths) / step_s,
        "tflop_per_s": tflops,
        "mfu": peak_tflops and tflops / peak_tflops,
        "peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
    }


def measure_what_fits(
    attempts: Sequence[tuple[str, bool]],
    lengths: Sequence[int],
    device: torch.device,
    rounds: int,
    peak_tflops: float | None,
    *,
    compile_ops: bool | None = None,
) -> dict[str, Any]:
    """Measure the first of the models that fits into memory."""
    for shape, gradient_checkpointing in attempts:
        figures = {"model": shape, "gradient_checkpointing": gradient_checkpointing, "compile_ops": compile_ops}
        try:
            backend = make_backend(
                shape, device, gradient_checkpointing=gradient_checkpointing, compile_ops=compile_ops
            )
            return figures | measure(backend, lengths, rounds, peak_tflops)
        except torch.OutOfMemoryError:
            print(f"does not fit: {figures}")
        backend = None  # type: ignore[assignment]  # the next one needs its memory
        gc.collect()
        torch.cuda.empty_cache()
    raise SystemExit("no model of the list fits into the GPU's memory")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def dense_bf16_peak(gpu_name: str) -> float | None:
    """Return the peak TFLOP/s of a GPU; None for one that is not in the table."""
    return next((peak for pattern, peak in PEAK_TFLOPS.items() if re.fullmatch(pattern, gpu_name)), None)


def main() -> None:
    """Measure, print the results and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="a CPU gets a tiny model")
    parser.add_argument("--quick", action="store_true", help="the smaller shape and fewer tokens: does it run?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak-tflops", type=float, help="of the GPU, dense bfloat16; default: by its name, if known")
    parser.add_argument("--compile-ops", action=argparse.BooleanOptionalAction, help="default: on a GPU")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    lengths, attempts = (LENGTHS[-4:], ATTEMPTS[2:]) if args.quick else (LENGTHS, ATTEMPTS)
    figures: dict[str, Any] = {"torch": torch.__version__, "device": args.device}
    if args.device == "cpu":
        lengths, attempts = [40, 30, 7], [("tiny", False)]
    else:
        figures["device"] = torch.cuda.get_device_name()
        args.peak_tflops = args.peak_tflops or dense_bf16_peak(figures["device"])
    device = torch.device(args.device)
    figures |= measure_what_fits(attempts, lengths, device, args.rounds, args.peak_tflops, compile_ops=args.compile_ops)
    for name, value in figures.items():
        print(f"{name:<24}{f'{value:.4g}' if isinstance(value, float) else value}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
