"""Tiny models, samples, the ways to cut samples into micro-batches, and how to run trainers as processes.

The samples of an optimizer step are the experiment; everything that cuts them is only how it is executed.
"""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from coati_rl.algorithms.grpo import GrpoLoss
from coati_rl.batch import MicroBatch, MiniBatch
from consumer.process_group import open_listener

ROOT = Path(__file__).resolve().parents[3]
VOCAB_SIZE = 96
LAUNCH_TIMEOUT_S = 900
LOSS = GrpoLoss(clip_low=0.2, clip_high=0.28, kl_coeff=0.1)
# AdamW's first step moves every weight by this, in the direction of the gradient's sign. Where a gradient is nearly 0
# the sign is rounding noise, so a large rate would turn 1e-7 in the first gradient into 1e-5 in the second.
LEARNING_RATE = 1e-4
MAX_GRAD_NORM = 0.05  # below the norms that occur, so that clipping takes part
WEIGHT_DECAY = 0.5  # large enough to be seen in an update
NUM_STEPS = 2
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {  # processes, and what the backend is told
    "dp1": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tp_size": 2}),
    "pp2": (2, {"pp_size": 2}),
    "tp2_pp2": (4, {"tp_size": 2, "pp_size": 2}),
    "zero1_dp2": (2, {"zero_stage": 1}),
    "zero2_dp2": (2, {"zero_stage": 2}),
    "tp2_zero1_dp2": (4, {"tp_size": 2, "zero_stage": 1}),
    # What else can be combined.
    "pp2_zero1_dp2": (4, {"pp_size": 2, "zero_stage": 1}),
    "tp2_zero2_dp2": (4, {"tp_size": 2, "zero_stage": 2}),
    "pp2_dp2": (4, {"pp_size": 2}),
    "zero1_dp1": (1, {"zero_stage": 1}),
}
ON_ONE_MODEL = {"pp2_zero1_dp2", "tp2_zero2_dp2", "pp2_dp2", "zero1_dp1"}


@dataclass(frozen=True)
class Unseparated:
    """The same loss, which does not say that it may be evaluated token by token."""

    loss: GrpoLoss
    is_token_separable: ClassVar[bool] = False

    def __call__(
        self, logprobs: torch.Tensor, entropy: torch.Tensor, micro_batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self.loss(logprobs, entropy, micro_batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A prompt and its response; per-token numbers are those of the response."""

    token_ids: np.ndarray  # int64[T]
    num_prompt: int
    advantage: float
    temperature: float
    rollout_logprobs: np.ndarray  # float32[T - num_prompt]

    @property
    def num_response(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def weight(self) -> float:
        return 1 / self.num_response


def make_samples(step: int, model_dir: Path | None = None) -> list[Sample]:
    """Eight samples of 6 to 30 tokens, others in each step.

    Args:
        model_dir: whose log-probabilities the sampling policy's are near to, at distances at which no rounding error
            decides whether a ratio is clipped; None: near those of a policy that knows nothing.
    """
    rng = np.random.default_rng(100 + step)
    samples = []
    for _ in range(8):
        num_prompt, num_response = int(rng.integers(3, 8)), int(rng.integers(3, 23))
        samples.append(
            Sample(
                token_ids=rng.integers(0, VOCAB_SIZE, num_prompt + num_response),
                num_prompt=num_prompt,
                advantage=float(rng.normal()),
                temperature=float(rng.uniform(0.7, 1.3)),
                rollout_logprobs=(-np.log(VOCAB_SIZE) + 0.3 * rng.normal(size=num_response)).astype(np.float32),
            )
        )
    if model_dir is None:
        return samples
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager").eval()
    with torch.no_grad():
        exact = [sample_logprobs(model, sample).numpy() for sample in samples]
    offsets = [rng.choice([-0.6, -0.1, -0.03, 0.03, 0.1, 0.6], size=len(logprobs)) for logprobs in exact]
    return [
        dataclasses.replace(sample, rollout_logprobs=(logprobs - offset).astype(np.float32))
        for sample, logprobs, offset in zip(samples, exact, offsets, strict=True)
    ]


def sample_logprobs(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    """float32[T - num_prompt]: by plain transformers, one sample alone, from whole logits."""
    token_ids = torch.tensor(sample.token_ids)[None]
    logits = model(input_ids=token_ids).logits[0, sample.num_prompt - 1 : -1].float() / sample.temperature
    return torch.log_softmax(logits, dim=-1).gather(-1, token_ids[0, sample.num_prompt :, None]).squeeze(-1)


def to_micro_batch(rows: Sequence[Sequence[Sample]]) -> MicroBatch:
    """One row per list of samples, padded to the longest row."""
    shape = (len(rows), max(sum(len(s.token_ids) for s in row) for row in rows))
    ints = {name: np.zeros(shape, dtype=np.int64) for name in ("token_ids", "position_ids")}
    floats = {name: np.zeros(shape, dtype=np.float32) for name in ("loss_weights", "advantages", "rollout_logprobs")}
    sample_index, loss_mask = np.full(shape, -1, dtype=np.int32), np.zeros(shape, dtype=bool)
    temperature, version = np.ones(shape, dtype=np.float32), np.full(shape, -1, dtype=np.int32)
    for r, row in enumerate(rows):
        begin = 0
        for index, sample in enumerate(row):
            end = begin + len(sample.token_ids)
            ints["token_ids"][r, begin:end] = sample.token_ids
            ints["position_ids"][r, begin:end] = np.arange(end - begin)
            sample_index[r, begin:end] = index
            response = (r, slice(begin + sample.num_prompt, end))
            loss_mask[response] = True
            floats["loss_weights"][response] = sample.weight
            floats["advantages"][response] = sample.advantage
            floats["rollout_logprobs"][response] = sample.rollout_logprobs
            temperature[response] = sample.temperature
            version[response] = 0
            begin = end
        ints["position_ids"][r, begin:] = np.arange(shape[1] - begin)
    return MicroBatch(
        **ints,
        **floats,
        sample_index=sample_index,
        loss_mask=loss_mask,
        temperature=temperature,
        policy_version=version,
    )


def cut(samples: Sequence[Sample], *, per_micro_batch: int, packed: bool) -> tuple[MicroBatch, ...]:
    """Micro-batches of so many samples: in one row, or one per row."""
    groups = [samples[i : i + per_micro_batch] for i in range(0, len(samples), per_micro_batch)]
    return tuple(to_micro_batch([group] if packed else [[sample] for sample in group]) for group in groups)


def to_mini_batch(micro_batches: Sequence[MicroBatch], *, step: int, is_last: bool = True) -> MiniBatch:
    return MiniBatch(
        step=step,
        micro_batches=tuple(micro_batches),
        is_last=is_last,
        loss_scale=1 / 8,
        learning_rate_progress=0.0,
    )


CONFIGS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig, "mistral": MistralConfig}


def save_model(directory: Path, architecture: str = "qwen3", *, tied: bool, **settings: object) -> Path:
    """A tiny model whose random weights bfloat16 can hold, so that both precisions start from the same."""
    torch.manual_seed(0)
    config = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32 if architecture == "qwen3" else 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
    }
    model = AutoModelForCausalLM.from_config(CONFIGS[architecture](**{**config, **settings}))
    for name, parameter in model.named_parameters():
        if "q_proj.weight" in name or "k_proj.weight" in name:
            parameter.data *= 4  # so that attention prefers some tokens, as in a trained model
    model.bfloat16().float().save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Directories of a tiny Qwen3 with tied (True) and untied embeddings."""
    root = tmp_path_factory.mktemp("models")
    return {tied: save_model(root / ("tied" if tied else "untied"), tied=tied) for tied in (True, False)}


def launch(script: str, *arguments: object, world_size: int) -> list[subprocess.CompletedProcess[str]]:
    """Run a script of this directory as so many trainers: SCRIPT RANK WORLD_SIZE PORT LISTENER_FD ARGUMENTS...

    Returns: one result per rank, whatever the exit codes; the listener's descriptor is rank 0's.
    """
    path = Path(__file__).with_name(script)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with open_listener("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        processes = [
            subprocess.Popen(
                [sys.executable, path, *map(str, (rank, world_size, port, listener.fileno(), *arguments))],
                pass_fds=[listener.fileno()] if rank == 0 else [],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
    results = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=LAUNCH_TIMEOUT_S)
            results.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
    return results


def launch_and_check(script: str, *arguments: object, world_size: int) -> list[subprocess.CompletedProcess[str]]:
    """The same, and all must end well."""
    results = launch(script, *arguments, world_size=world_size)
    for rank, result in enumerate(results):
        assert result.returncode == 0, f"rank {rank} of {world_size}:\n{result.stdout}\n{result.stderr}"
    return results
