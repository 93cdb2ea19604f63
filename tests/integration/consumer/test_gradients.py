"""The gradient of an optimizer step is that of its samples, however they are cut and over however many ranks.

The oracle knows no rows, micro-batches or ranks: plain transformers, one sample at a time, full logits, GRPO as in the
paper, torch's own clipping and AdamW.
"""

import copy
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.integration.consumer.conftest import (
    LEARNING_RATE,
    LOSS,
    MAX_GRAD_NORM,
    NUM_STEPS,
    WEIGHT_DECAY,
    Sample,
    launch_and_check,
    make_samples,
    sample_logprobs,
)
from tests.integration.consumer.gradient_process import SIZES, SPLITS

TOLERANCE = 1e-5  # relative L2 per tensor, float32
UPDATE_TOLERANCE = 2e-3  # the same, of what AdamW makes of it

Steps = list[dict[str, Any]]


def sample_loss(model: PreTrainedModel, reference: PreTrainedModel, sample: Sample) -> Tensor:
    logprobs = sample_logprobs(model, sample)
    ratio = torch.exp(logprobs - torch.tensor(sample.rollout_logprobs))
    surrogate = torch.min(
        ratio * sample.advantage, ratio.clamp(1 - LOSS.clip_low, 1 + LOSS.clip_high) * sample.advantage
    )
    with torch.no_grad():
        towards = sample_logprobs(reference, sample) - logprobs
    towards = towards + logprobs.detach() - logprobs  # the same value, with the policy's gradient
    return (-surrogate + LOSS.kl_coeff * (torch.exp(towards) - towards - 1)).mean()


def plain_training(model_dir: Path, precision: str = "fp32") -> Steps:
    """In float32; with "bf16" the weights that are computed with are rounded to bfloat16, as those of a trainer are."""
    masters = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager").eval()
    model, reference = copy.deepcopy(masters), copy.deepcopy(masters)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    steps = []
    for step in range(NUM_STEPS):
        for sample in make_samples(step, model_dir):
            sample_loss(model, reference, sample).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad / 8, None
        norm = torch.nn.utils.clip_grad_norm_(masters.parameters(), MAX_GRAD_NORM).item()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
                parameter.copy_(master.bfloat16() if precision == "bf16" else master)
        updates = {name: p.detach() - before[name] for name, p in model.named_parameters()}
        steps.append({"gradients": gradients, "norm": norm, "updates": updates})
    return steps


@pytest.fixture(scope="session")
def expected(models: dict[bool, Path]) -> dict[str, Steps]:
    return {path.name: plain_training(path) for path in models.values()}


@pytest.fixture(scope="session")
def trained(models: dict[bool, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[Any, Steps]]]:
    """World size to the results of each rank."""
    out_dir = tmp_path_factory.mktemp("gradients")
    for world_size in (1, 2):
        launch_and_check("gradient_process.py", out_dir, *models.values(), world_size=world_size)
    return {
        world_size: [torch.load(out_dir / f"rank{rank}of{world_size}.pt") for rank in range(world_size)]
        for world_size in (1, 2)
    }


def worst_difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> tuple[float, str]:
    assert left.keys() == right.keys()
    return max((float((left[name] - right[name]).norm() / right[name].norm()), name) for name in right)


CASES = list(itertools.product(("tied", "untied"), SPLITS, SIZES, (True, False)))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("model", "split", "size", "packed"), CASES)
def test_every_cut_gives_the_plain_gradient_and_norm_for_two_steps(
    trained: dict[int, list[dict[Any, Steps]]],
    expected: dict[str, Steps],
    world_size: int,
    model: str,
    split: str,
    size: int,
    packed: bool,
) -> None:
    for rank in range(world_size):
        for step, right in zip(trained[world_size][rank][model, split, size, packed], expected[model], strict=True):
            difference, name = worst_difference(step["gradients"], right["gradients"])
            assert difference < TOLERANCE, name
            assert step["norm"] == pytest.approx(right["norm"], rel=TOLERANCE)
            assert step["norm"] > MAX_GRAD_NORM
            # The update follows signs of gradients that may be noise; this compares learning rate, decay and clipping.
            assert worst_difference(step["updates"], right["updates"])[0] < UPDATE_TOLERANCE


def test_ranks_take_bit_equal_steps(trained: dict[int, list[dict[Any, Steps]]]) -> None:
    for case, steps in trained[2][0].items():
        for first, second in zip(steps, trained[2][1][case], strict=True):
            assert first["norm"] == second["norm"]
            assert all(torch.equal(first["updates"][name], update) for name, update in second["updates"].items())


def test_a_rank_without_samples_reports_the_same_keys(trained: dict[int, list[dict[Any, Steps]]]) -> None:
    case = ("tied", "uneven", 2, True)
    assert trained[2][0][case][0]["keys"] == trained[2][1][case][0]["keys"]


def test_a_wrong_denominator_would_be_noticed(expected: dict[str, Steps]) -> None:
    right = expected["tied"][0]["gradients"]
    wrong = {name: gradient * (7 / 8) for name, gradient in right.items()}
    assert worst_difference(wrong, right)[0] > 1000 * TOLERANCE
