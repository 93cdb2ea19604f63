"""Model FLOPs utilisation of an optimizer step on packed rows, in bfloat16 with float32 masters, through TorchBackend.

In: a model's shape, whose weights are random, and the lengths of the samples. Out: TFLOP/s, and their share of the
GPU's dense bf16 peak where that is known. Before, packed rows are compared with each sample alone: what is fast has to
be right. T tokens, T' of them counted by the loss, t of a sample, A heads x head size.

    FLOPs = 6 N T + 6 V H T' + 6 A sum(t^2) * layers

N are the weights of all matrix products but the LM head's, V H, which is applied where there is a loss and nowhere
else; causal attention has t^2 / 2 pairs with 2 A multiply-adds each; the backward counts twice. What gradient
checkpointing computes again, the embedding, norms and the optimizer do not count.
"""

import gc
import inspect
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.batch import MicroBatch, MiniBatch
from coati_rl.data.packing import Sample, pack
from consumer import packed_attention
from consumer.policy_model import no_progress_bars
from consumer.torch_backend import BackendConfig, TorchBackend
from gpu_checks.outcome import CheckError, Outcome

# As published in their config.json: https://huggingface.co/Qwen/Qwen2-0.5B and Qwen2-1.5B.
SHAPES: dict[str, dict[str, float]] = {
    "qwen2-0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "qwen2-1.5b": {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "tiny": {  # for a look at the program on a CPU
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.1,  # so narrow a model would hardly look at its context otherwise
    },
}
PROMPT_SHARE = 0.25
# Short, as attention to thousands of random tokens has a mean that hardly depends on whose they are.
COMPARED_LENGTHS = (96, 64, 48, 33)
# Mean |difference| in nats of a token's log-probability, packed against alone, in bfloat16. With four layers of the
# 0.5B shape, on a CPU, bfloat16 alone makes 0.005 of float32's; samples that see each other make 0.4.
PACKING_TOLERANCE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSettings:
    """What is trained."""

    device: str
    attempts: list[tuple[str, bool]]  # model shape, gradient checkpointing; the first that memory holds
    lengths: list[int]  # of the packed samples, prompt and response
    rounds: int
    peak_tflops: float | None  # of the GPU, dense bf16
    peak_source: str | None


def check_training(settings: TrainingSettings, outcome: Outcome) -> None:
    """Train what fits."""
    outcome.figures["attention"] = adapt_varlen()
    for name, checkpoints in settings.attempts:
        label = f"{name}{', gradient checkpointing' if checkpoints else ''}"
        try:
            train(name, checkpoints, settings, outcome)
        except torch.OutOfMemoryError:
            outcome.figures[f"did not fit: {label}"] = "out of memory"
        else:
            outcome.figures["model"] = label
            return
        gc.collect()
        torch.cuda.empty_cache()
    raise CheckError("no model of the list fits into the GPU's memory")


def train(name: str, checkpoints: bool, settings: TrainingSettings, outcome: Outcome) -> None:
    """Compare, then time whole optimizer steps."""
    device = torch.device(settings.device)
    with tempfile.TemporaryDirectory() as directory, no_progress_bars():
        save_model(Path(directory), SHAPES[name], device)
        config = BackendConfig(model_dir=Path(directory), precision="bf16", gradient_checkpointing=checkpoints)
        backend = TorchBackend(config, device=device)
    vocabulary = int(SHAPES[name]["vocab_size"])
    difference = packing_difference(backend, make_samples(COMPARED_LENGTHS, vocabulary))
    outcome.figures["packed_against_alone_nats"] = difference
    outcome.expect(difference <= PACKING_TOLERANCE, f"packed samples differ from samples alone by {difference:.3f}")
    samples = make_samples(settings.lengths, vocabulary)
    (micro_batch,) = _batch(samples, len(samples))
    micro_batch = replace(micro_batch, rollout_logprobs=backend.score([micro_batch])[0].cpu().numpy())
    seconds, losses = [], []
    for index in range(settings.rounds + 2):  # the first ones, in which memory is found, are not timed
        _synchronize(device)
        begin = time.perf_counter()
        losses.append(take_step(backend, micro_batch, index))
        _synchronize(device)
        seconds.append(time.perf_counter() - begin)
    outcome.expect(bool(np.isfinite(losses).all()), f"losses {losses}: not all finite")
    step_s = statistics.median(seconds[2:])
    counted = sum(len(sample.response_ids) for sample in samples)
    tflops = step_flops(backend.policy, settings.lengths, counted) / step_s / 1e12
    outcome.figures |= {"parameters": sum(p.numel() for p in backend.policy.parameters())}
    outcome.figures |= {"tokens": sum(settings.lengths), "counted_tokens": counted, "step_s": step_s}
    outcome.figures |= {"tokens_per_s": sum(settings.lengths) / step_s, "tflop_per_s": tflops}
    outcome.figures |= {"mfu": settings.peak_tflops and tflops / settings.peak_tflops}
    outcome.figures |= {"peak_tflop_per_s": settings.peak_tflops or "unknown for this GPU: no MFU"}
    outcome.figures |= {"peak_source": settings.peak_source}
    if device.type == "cuda":
        outcome.figures["peak_memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30


def step_flops(model: PreTrainedModel, lengths: Sequence[int], counted_tokens: int) -> int:
    """See the module's docstring."""
    head = model.get_output_embeddings()
    products = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    weights = sum(module.weight.numel() for module in products)
    config = model.config
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = config.num_attention_heads * head_size * config.num_hidden_layers * sum(t * t for t in lengths)
    return 6 * (weights * sum(lengths) + head.weight.numel() * counted_tokens + attention)


def adapt_varlen() -> str:
    """Name the attention of a GPU; PyTorch 2.11's has no `enable_gqa`, and shares KV heads unasked."""
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        return "varlen_attn"

    def attend(*arguments: Any, enable_gqa: bool, **keywords: Any) -> Any:
        return varlen_attn(*arguments, **keywords)

    packed_attention.varlen_attn = attend  # type: ignore[assignment]
    return f"varlen_attn of PyTorch {torch.__version__}, without enable_gqa"


def save_model(directory: Path, shape: dict[str, float], device: torch.device) -> None:
    """A random model in bfloat16, drawn on the device."""
    config = Qwen2Config(**shape, max_position_embeddings=32768, rope_theta=1e6, tie_word_embeddings=True)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)


def make_samples(lengths: Sequence[int], vocabulary: int) -> list[Sample]:
    """Random tokens, a quarter of each sample being prompt."""
    rng = np.random.default_rng(0)
    samples = []
    for number, length in enumerate(lengths):
        start = max(1, int(PROMPT_SHARE * length))
        token_ids = rng.integers(0, vocabulary, length)
        samples.append(
            Sample(
                uid=f"sample-{number}",
                number=0,
                prompt_ids=token_ids[:start],
                response_ids=token_ids[start:],
                loss_weight=1.0,
                advantage=rng.normal(),
                rollout_logprobs=np.zeros(length - start, dtype=np.float32),
                temperature=1.0,
                policy_versions=np.zeros(length - start, dtype=np.int32),
            )
        )
    return samples


def take_step(backend: TorchBackend, micro_batch: MicroBatch, index: int) -> float:
    """A whole optimizer step. Returns: the mean loss."""
    scale = 1 / int(micro_batch.loss_mask.sum())
    batch = MiniBatch(
        step=index, micro_batches=(micro_batch,), is_last=True, loss_scale=scale, learning_rate_progress=0.0
    )
    sums = backend.forward_backward(batch, PolicyLoss())
    backend.optimizer_step(loss_scale=scale, learning_rate=1e-6)
    return float(sums["loss_sum"]) * scale


def packing_difference(backend: TorchBackend, samples: Sequence[Sample]) -> float:
    """Mean |difference| of log-probabilities, our packed attention against transformers' on each sample alone."""
    packed, alone = _batch(samples, len(samples)), _batch(samples, 1)
    together = _by_sample(packed, backend.score(packed))
    backend.policy.set_attn_implementation("sdpa")
    separate = _by_sample(alone, backend.score(alone))
    backend.policy.set_attn_implementation(packed_attention.NAME)
    return float(torch.cat([(together[i] - separate[i]).abs() for i in separate]).mean())


def _by_sample(micro_batches: Sequence[MicroBatch], scores: Sequence[Tensor]) -> dict[int, Tensor]:
    """Index of a sample -> float32[T'] of its counted tokens."""
    return {
        int(index): score[torch.from_numpy((batch.sample_index == index) & batch.loss_mask).to(score.device)]
        for batch, score in zip(micro_batches, scores, strict=True)
        for index in np.unique(batch.sample_index[batch.sample_index >= 0])
    }


def _batch(samples: Sequence[Sample], max_samples: int) -> tuple[MicroBatch, ...]:
    return pack(samples, max_samples=max_samples)[0]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
