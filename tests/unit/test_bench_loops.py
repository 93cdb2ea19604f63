"""Test that both loops of scripts/bench/training_loops.py take the same optimizer steps, and what stops a bench."""

import math

import numpy as np
import pytest
import torch
from bench.random_model import save_random_model
from bench.training_loops import LOG_RATIOS, TOLERANCES, BackendLoop, PlainLoop, check_agreement, load

from coati_rl.batching.packing import pack
from coati_rl.samples import Sample
from consumer.backend import Backend
from consumer.models.policy_model import DTYPES
from consumer.parallel.single_process import SingleProcess
from tests.backends import backend_config

VOCAB = 64


def samples():
    rng = np.random.default_rng(0)
    for number, length in enumerate((7, 12, 5)):
        response = length - 3
        yield Sample(
            uid=f"sample-{number}",
            number=0,
            prefix_ids=rng.integers(0, VOCAB, 3),
            token_ids=rng.integers(0, VOCAB, response),
            loss_mask=np.ones(response, dtype=bool),
            arrays={
                "loss_weights": 1 / response,
                "advantages": rng.normal(),
                "rollout_logprobs": (-math.log(VOCAB) - rng.choice(LOG_RATIOS, response)).astype(np.float32),
                "temperature": 0.8,
                "policy_version": np.zeros(response, dtype=np.int32),
            },
        )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_and_norms_of_both_agree_over_steps_and_the_weights_move(tmp_path, precision):
    save_random_model(tmp_path, vocab=VOCAB, hidden=64, layers=2, max_positions=32)
    backend = Backend(backend_config(tmp_path, precision=precision), SingleProcess(device=torch.device("cpu")))
    batch = (pack(list(samples()), max_samples=3, max_tokens=20)[0], 1 / 3)
    assert len(batch[0]) == 2, "gradients of two micro-batches are added up"
    plain = PlainLoop(load(tmp_path, dtype=DTYPES[precision]), *batch)
    before = [master.clone() for master in plain.masters]
    ours = BackendLoop(backend, *batch)
    steps = {name: [loop.step() for _ in range(2)] for name, loop in (("ours", ours), ("plain", plain))}
    found, expected = (dict(zip(("loss", "norm"), zip(*each, strict=True), strict=True)) for each in steps.values())
    assert check_agreement("ours", found, expected, TOLERANCES[precision]) > 0, "they are not the same code"
    assert all(master.dtype == torch.float32 for master in plain.masters)
    assert not any(torch.equal(*pair) for pair in zip(before, plain.masters, strict=True))


@pytest.mark.parametrize("norm", [1.1, math.nan])
def test_another_norm_or_none_stops_a_bench(norm):
    with pytest.raises(SystemExit, match="ours: a loss or gradient norm differs by"):
        check_agreement("ours", {"loss": [2.0], "norm": [norm]}, {"loss": [2.0], "norm": [1.0]}, 0.05)
