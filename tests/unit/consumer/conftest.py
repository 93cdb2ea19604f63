"""Provide tiny models with random weights, and micro-batches of literal tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coati_rl.batch import MicroBatch
from coati_rl.model_files.quiet import no_progress_bars
from tests.micro_batches import grid_micro_batch

Sample = tuple[Sequence[int], int]  # token ids, how many of them are the prompt


def make_micro_batch(*samples: Sample, version: int = 0) -> MicroBatch:
    """One packed row; advantage 1, weight 1, temperature 1, log-probability when sampled -4."""
    lengths = [len(token_ids) for token_ids, _ in samples]
    response = [[False] * prompt + [True] * (len(ids) - prompt) for ids, prompt in samples]
    loss_mask = np.concatenate(response)[None]
    as_floats = loss_mask.astype(np.float32)
    return grid_micro_batch(
        token_ids=np.concatenate([np.asarray(ids, dtype=np.int64) for ids, _ in samples])[None],
        position_ids=np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])[None],
        sample_index=np.repeat(np.arange(len(samples), dtype=np.int32), lengths)[None],
        loss_mask=loss_mask,
        loss_weights=as_floats,
        advantages=as_floats,
        rollout_logprobs=-4 * as_floats,
        temperature=np.ones_like(as_floats),
        policy_version=np.where(loss_mask, version, -1).astype(np.int32),
    )


SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def make_model(model_type: str = "qwen3", **settings: object) -> PreTrainedModel:
    """Two layers; keyword arguments go into the config."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **settings})
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_model`, saved."""

    def save(model_type: str = "qwen3", **settings: object) -> Path:
        directory = tmp_path_factory.mktemp("model")
        with no_progress_bars():
            make_model(model_type, **settings).save_pretrained(directory)
        return directory

    return save


@pytest.fixture(scope="session")
def model_dir(save_model: Callable[..., Path]) -> Path:
    """The default one, a Qwen3, with tied embeddings."""
    return save_model(tie_word_embeddings=True)


@pytest.fixture(scope="session")
def written_adapter(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(model directory, settings) -> an adapter that PEFT has written, once for all tests."""
    from tests.adapter_dirs import save_adapter  # PEFT takes a second to import

    written: dict[str, Path] = {}

    def write(model_dir: Path, **settings: Any) -> Path:
        key = f"{model_dir} {settings}"
        if key not in written:
            written[key] = tmp_path_factory.mktemp("adapter")
            save_adapter(written[key], AutoModelForCausalLM.from_pretrained(model_dir), **settings)
        return written[key]

    return write
