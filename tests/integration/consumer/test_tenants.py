"""Test that a training session has the gradients of plain torch and PEFT in every layout, and isolates its models."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from coati_rl.tinker.core import AdamStep
from tests.integration.consumer.conftest import save_model
from tests.integration.consumer.tenant_process import LAYOUTS, STEPS, WHOLE_STEPS, take
from tests.integration.consumer.trainer_server import TrainerServers
from tests.tenants import LOSSES, make_rank, named, plain_pass, read_peft, request, worst, write_start

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
Recorded = Mapping[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), tied=True, vocab_size=50)


@pytest.fixture(scope="module")
def start(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("start") / "adapter"
    write_start(model_dir, directory)
    return directory


@pytest.fixture(scope="module")
def out_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def recorded(trainers: TrainerServers, out_dir: Path, model_dir: Path, start: Path) -> Recorded:
    trainers.launch_and_check(take, out_dir, model_dir, start, world_size=2)
    return {
        layout: [torch.load(out_dir / f"{layout}-rank{rank}.pt", weights_only=False) for rank in range(2)]
        for layout in LAYOUTS
    }


def whole_results(layout: str, ranks: list[Any]) -> tuple[float, list[np.ndarray]]:
    parts = ranks[:1] if layout in ("tp2", "fsdp2_tp2") else ranks
    logprobs = sorted((index, values) for part in parts for _, index, values in part["logprobs"])
    return sum(loss for part in parts for _, loss in part["losses"]), [values for _, values in logprobs]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_each_loss_has_the_gradient_of_plain_torch_with_peft(
    layout: str, loss: str, recorded: Recorded, model_dir: Path, start: Path
) -> None:
    assert_is_the_plain_pass(layout, [each["gradients"][loss] for each in recorded[layout]], loss, model_dir, start)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_targets_of_a_position(layout: str, recorded: Recorded, model_dir: Path, start: Path) -> None:
    found = [each["several"] for each in recorded[layout]]
    assert_is_the_plain_pass(layout, found, "cross_entropy", model_dir, start, width=3)


def assert_is_the_plain_pass(
    layout: str, found: list[Any], loss: str, model_dir: Path, start: Path, **options: Any
) -> None:
    model = read_peft(model_dir, start)
    total, logprobs = plain_pass(model, request("a", 1, loss, **options).data, loss)
    its_total, its_logprobs = whole_results(layout, [results for results, _ in found])
    assert its_total == pytest.approx(total, rel=1e-5)
    for one, other in zip(its_logprobs, logprobs, strict=True):
        np.testing.assert_allclose(one, other.flatten(), atol=3e-6)
    assert all(worst(gradients, named(model, "grad")) < 1e-5 for _, gradients in found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_steps_are_those_of_adamw(
    layout: str, recorded: Recorded, out_dir: Path, model_dir: Path, start: Path
) -> None:
    model = read_peft(model_dir, start)
    sent = [[request("a", 10 * number + part, "importance_sampling") for part in (0, 1)] for number in range(3)]
    norms = plain_steps(model, sent, STEPS)
    assert all(each["adapters"] == pytest.approx(norms, rel=1e-5) for each in recorded[layout])
    same(named(read_peft(model_dir, out_dir / f"{layout}-adapters")), named(model))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_steps_of_all_weights(layout: str, recorded: Recorded, out_dir: Path, model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    norms = plain_steps(model, [[request("w", number, LOSSES[number + 3])] for number in range(3)], WHOLE_STEPS)
    assert all(each["whole"] == pytest.approx(norms, rel=1e-5) for each in recorded[layout])
    saved = AutoModelForCausalLM.from_pretrained(out_dir / f"{layout}-whole", dtype=torch.float32)
    same(dict(saved.named_parameters()), dict(model.named_parameters()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_has_equal_bits_alone_and_among_others(layout: str, recorded: Recorded) -> None:
    assert all(all(each["isolated"]) for each in recorded[layout])


def test_a_checkpoint_of_two_ranks_is_loaded_by_one(recorded: Recorded, out_dir: Path, model_dir: Path) -> None:
    rank = make_rank(model_dir)
    for layout in LAYOUTS:
        assert rank.load(layout, out_dir / f"{layout}-adapters", True) == ""
        assert rank._base.sets[layout].num_steps == len(STEPS)


def plain_steps(model: Any, sent: list[list[Any]], steps: Sequence[AdamStep]) -> list[float]:
    trained = [each for each in model.parameters() if each.requires_grad]
    plain = torch.optim.AdamW(trained, betas=(0.9, 0.95), eps=1e-12)
    norms = []
    for requests, step in zip(sent, steps, strict=True):
        for each in requests:
            plain_pass(model, each.data, each.loss)
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, step.grad_clip_norm or math.inf)))
        plain.param_groups[0].update(lr=step.learning_rate, eps=step.eps, weight_decay=step.weight_decay)
        plain.step()
        plain.zero_grad()
    return norms


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, atol=1e-6, rtol=0.0)
