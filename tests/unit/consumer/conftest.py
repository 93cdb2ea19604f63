"""A tiny Qwen3 with random weights, and micro-batches of literal tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from coati_rl.batch import MicroBatch
from consumer.policy_model import no_progress_bars

Sample = tuple[Sequence[int], int]  # token ids, how many of them are the prompt


def make_micro_batch(*samples: Sample, version: int = 0) -> MicroBatch:
    """One packed row; advantage 1, weight 1, temperature 1, log-probability when sampled -4."""
    lengths = [len(token_ids) for token_ids, _ in samples]
    response = [[False] * prompt + [True] * (len(ids) - prompt) for ids, prompt in samples]
    loss_mask = np.concatenate(response)[None]
    as_floats = loss_mask.astype(np.float32)
    return MicroBatch(
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


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Saves a model of two layers; keyword arguments go into its config."""

    def save(**settings: object) -> Path:
        torch.manual_seed(0)
        sizes = {
            "vocab_size": 50,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
        }
        directory = tmp_path_factory.mktemp("model")
        with no_progress_bars():
            Qwen3ForCausalLM(Qwen3Config(**{**sizes, **settings})).save_pretrained(directory)
        return directory

    return save


@pytest.fixture(scope="session")
def model_dir(save_model: Callable[..., Path]) -> Path:
    """The default one, with tied embeddings."""
    return save_model(tie_word_embeddings=True)
