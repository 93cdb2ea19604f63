"""Compare the divergence from a teacher with TRL's: value and gradient on the same hidden states and LM heads."""

import numpy as np
import pytest
import torch

from coati_rl.ops.vocabulary_kl import vocabulary_kl_loss
from tests.unit.algorithms.importing_trl import importing_trl

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore:TRL currently supports vLLM")]

B, T, H, G, V = 3, 6, 8, 5, 11  # G: hidden size of the teacher
BETA = {"forward": 0.0, "reverse": 1.0}


@pytest.fixture(scope="module")
def divergence_loss():
    """`DistillationTrainer`'s own loss."""
    with importing_trl():
        from trl.trainer.distillation_trainer import _chunked_divergence_loss
    return _chunked_divergence_loss


@pytest.mark.parametrize("direction", BETA)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_forward_and_reverse_kl_are_trls(divergence_loss, direction: str, temperature: float) -> None:
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.tensor(rng.normal(size=shape), dtype=torch.float32)

    hidden, weight, bias = normal(B, T, H), normal(V, H), normal(V)
    its_hidden, its_weight, its_bias = normal(B, T, G), normal(V, G), normal(V)
    mask = torch.tensor(rng.random((B, T)) < 0.6)
    theirs = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
    expected, _, num_tokens = divergence_loss(
        theirs[0],
        its_hidden,
        theirs[1],
        its_weight,
        mask.long(),
        BETA[direction],
        student_lm_head_bias=theirs[2],
        teacher_lm_head_bias=its_bias,
        temperature=temperature,
    )
    expected.backward()
    ours = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
    ones = torch.ones(B, T)
    arrays = {
        "token_ids": torch.zeros(B, T, dtype=torch.int64),
        "sources": torch.arange(T).expand(B, T),
        "loss_mask": mask,
        "temperature": temperature * ones,
        "loss_weights": ones,
    }
    loss, sums = vocabulary_kl_loss(
        *ours,
        arrays,
        teacher_hidden=its_hidden,
        teacher_weight=its_weight,
        teacher_bias=its_bias,
        direction=direction,
    )
    (loss / num_tokens).backward()
    assert loss.item() / num_tokens == pytest.approx(expected.item(), rel=1e-5)
    assert sums["teacher_kl_sum"].item() == pytest.approx(loss.item(), rel=1e-6)  # all weights are 1
    for found, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found.grad, right.grad, rtol=1e-5, atol=1e-6)
