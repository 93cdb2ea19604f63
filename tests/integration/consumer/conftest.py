"""Tiny models, the layouts of trainers, and how to run trainers as processes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from consumer.process_group import open_listener

ROOT = Path(__file__).resolve().parents[3]
VOCAB_SIZE = 96
LAUNCH_TIMEOUT_S = 900
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
    # What else can be combined of these.
    "pp2_zero1_dp2": (4, {"pp_size": 2, "zero_stage": 1}),
    "tp2_zero2_dp2": (4, {"tp_size": 2, "zero_stage": 2}),
    "pp2_dp2": (4, {"pp_size": 2}),
    "zero1_dp1": (1, {"zero_stage": 1}),
}
COMBINED = {"pp2_zero1_dp2", "tp2_zero2_dp2", "pp2_dp2", "zero1_dp1"}


CONFIGS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig, "mistral": MistralConfig}


def save_model(directory: Path, architecture: str = "qwen3", *, tied: bool, seed: int = 0, **settings: object) -> Path:
    """A tiny model whose random weights bfloat16 can hold, so that both precisions start from the same."""
    torch.manual_seed(seed)
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


def save_with_reference(directory: Path, architecture: str = "qwen3", **settings: Any) -> Path:
    """A model, and another one of its kind as its reference."""
    save_model(directory, architecture, **settings)
    save_model(reference_of(directory), architecture, **settings, seed=1)
    return directory


def reference_of(model_dir: Path) -> Path:
    return model_dir / "reference"


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
