"""Test that many models on one base get the gradients of plain torch and PEFT, and never see each other."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel

from coati_rl.tinker.core import AdamStep, LossRequest, ModelSpec
from consumer.tenants.pieces import passes
from consumer.tenants.rank import TenantRank
from tests.tenants import (
    LOSSES,
    logprobs_of,
    loss_of,
    make_rank,
    named,
    plain_pass,
    read_peft,
    request,
    whole_gradients,
    worst,
    write_start,
)

STEP = AdamStep(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=1.0)


@pytest.fixture(scope="module")
def rank(model_dir: Path) -> TenantRank:
    return make_rank(model_dir)


@pytest.fixture(scope="module")
def start(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("start") / "adapter"
    write_start(model_dir, directory)
    return directory


@pytest.fixture(scope="module")
def of_peft(model_dir: Path, start: Path) -> PeftModel:
    """The same adapters in PEFT; no test moves them."""
    return read_peft(model_dir, start)


@pytest.fixture
def model(of_peft: PeftModel) -> PeftModel:
    """Without a gradient."""
    of_peft.zero_grad()
    return of_peft


@pytest.mark.parametrize("loss", LOSSES)
def test_each_loss_has_the_gradient_of_plain_torch_with_peft(
    loss: str, rank: TenantRank, start: Path, model: PeftModel
) -> None:
    assert rank.load("a", start, False) == ""
    sent = request("a", 1, loss)
    results = rank.forward_backward([sent])
    expected, logprobs = plain_pass(model, sent.data, loss)
    assert loss_of(results) == pytest.approx(expected, rel=1e-5)
    for found, plain in zip(logprobs_of(results), logprobs, strict=True):
        np.testing.assert_allclose(found, plain, atol=3e-6)
    assert worst(whole_gradients(rank._base.sets["a"]), named(model, "grad")) < 1e-5


def test_a_position_may_have_several_targets(rank: TenantRank, start: Path, model: PeftModel) -> None:
    rank.load("a", start, False)
    sent = request("a", 2, width=3)
    results = rank.forward_backward([sent])
    _, logprobs = plain_pass(model, sent.data, "cross_entropy")
    for found, plain in zip(logprobs_of(results), logprobs, strict=True):
        np.testing.assert_allclose(found, plain.flatten(), atol=3e-6)
    assert worst(whole_gradients(rank._base.sets["a"]), named(model, "grad")) < 1e-5


def test_gradients_add_up_and_three_steps_are_those_of_adamw(
    rank: TenantRank, start: Path, model_dir: Path, tmp_path: Path
) -> None:
    """The numbers of the third step differ; the checkpoint is PEFT's."""
    rank.load("a", start, False)
    model = read_peft(model_dir, start)
    trained = [each for each in model.parameters() if each.requires_grad]
    plain = torch.optim.AdamW(trained, betas=(0.9, 0.95), eps=1e-12)
    for number, step in enumerate((STEP, STEP, replace(STEP, learning_rate=1e-3, beta1=0.8, grad_clip_norm=0.0))):
        for part in (0, 1):
            sent = request("a", 10 * number + part, "importance_sampling", lengths=(17, 5, 9))
            rank.forward_backward([sent])
            plain_pass(model, sent.data, sent.loss)
        found = rank.optim_step("a", step)
        norm = torch.nn.utils.clip_grad_norm_(trained, step.grad_clip_norm or math.inf)
        assert found == pytest.approx(float(norm), rel=1e-5)
        group = plain.param_groups[0]
        group.update(lr=step.learning_rate, betas=(step.beta1, step.beta2), weight_decay=step.weight_decay)
        plain.step()
        plain.zero_grad()
    rank.save("a", tmp_path / "saved", True)
    found = named(read_peft(model_dir, tmp_path / "saved"))
    for name, expected in named(model).items():
        torch.testing.assert_close(found[name], expected, atol=1e-6, rtol=0.0)


def random_requests(seed: int, num_models: int) -> list[LossRequest]:
    """Two or three of each model, of various sizes and losses."""
    rng = np.random.default_rng(seed)
    return [
        request(
            f"m{model}",
            100 * model + number,
            LOSSES[rng.integers(len(LOSSES))],
            lengths=tuple(rng.integers(1, 60, rng.integers(1, 7))),
            is_forward_only=bool(rng.random() < 0.2),
        )
        for model in range(num_models)
        for number in range(rng.integers(2, 4))
    ]


def interleaved(requests: list[LossRequest], seed: int) -> list[list[LossRequest]]:
    """Calls of requests of several models, each model's in their order."""
    rng = np.random.default_rng(seed)
    models = rng.permutation([each.model for each in requests])
    left = {model: [each for each in requests if each.model == model] for model in models}
    ordered = [left[model].pop(0) for model in models]
    places = sorted(rng.integers(0, len(ordered) + 1, 4))
    return [ordered[a:b] for a, b in zip([0, *places], [*places, len(ordered)], strict=True) if a < b]


def make_models(rank: TenantRank, specs: list[ModelSpec]) -> None:
    for number, spec in enumerate(specs):
        rank.create(f"m{number}", spec)


SPECS = [
    ModelSpec(rank=4, seed=1),
    ModelSpec(rank=4, seed=2),
    ModelSpec(rank=4, seed=3),
    ModelSpec(rank=8, seed=4),
    ModelSpec(rank=4, seed=5, trains_head=False),
    ModelSpec(rank=2, seed=6, trains_mlp=False),
    ModelSpec(rank=4, seed=7),
    ModelSpec(rank=1, seed=8, trains_attention=False, trains_head=False),
]


ONE_OF_EACH_KIND = (0, 3, 4, 5)


@pytest.mark.parametrize(
    ("seed", "compared", "num_steps"),
    [(0, ONE_OF_EACH_KIND, 1), *(pytest.param(seed, range(7), 2, marks=pytest.mark.full) for seed in range(12))],
)
def test_a_model_has_equal_bits_alone_and_among_seven_others_of_which_one_sends_nans(
    seed: int, compared: Sequence[int], num_steps: int, rank: TenantRank
) -> None:
    requests = random_requests(seed, 8)

    def run(calls: list[list[LossRequest]], chosen: list[int]) -> dict[str, object]:
        make_models(rank, SPECS)
        if 7 in chosen:
            rank._base.sets["m7"]._weights.fill_(math.nan)  # as after a step that overflowed
        found: dict[str, object] = {f"m{number}": [] for number in chosen}
        for _ in range(num_steps):
            for call in calls:
                results = rank.forward_backward(call)
                for number, each in enumerate(call):
                    found[each.model].append((logprobs_of(results, number), loss_of(results, number)))
            for number in chosen:
                found[f"m{number}"].append(rank.optim_step(f"m{number}", STEP))
        tensors = {f"m{number}": rank._base.sets[f"m{number}"].full(with_moments=True) for number in chosen}
        return {model: (found[model], tensors[model]) for model in found}

    among = run(interleaved(requests, seed), list(range(8)))
    assert among["m0"][0][-1] > 0 and among["m7"][0][-1] is None
    for number in compared:
        alone = run([[each] for each in requests if each.model == f"m{number}"], [number])
        found, tensors = among[f"m{number}"]
        expected, own = alone[f"m{number}"]
        for one, other in zip(found, expected, strict=True):
            if not isinstance(one, tuple):
                assert one == other
            else:
                assert one[1] == other[1]
                assert all(np.array_equal(a, b) for a, b in zip(one[0], other[0], strict=True))
        assert all(torch.equal(tensors[name], each) for name, each in own.items())


def test_a_pass_has_one_piece_of_a_model_and_keeps_their_order() -> None:
    from consumer.objectives.tinker_losses import tinker_loss
    from consumer.tenants.pieces import cut

    loss = tinker_loss("cross_entropy", {})
    pieces = [
        piece
        for number, (model, lengths) in enumerate([("a", (60, 60, 9)), ("b", (20,)), ("a", (5,))])
        for piece in cut(request(model, 0, lengths=lengths), number, range(len(lengths)), loss, max_tokens=64)
    ]
    found = [[(piece.model, piece.request, piece.data) for piece in each] for each in passes(pieces, max_tokens=100)]
    assert found == [
        [("b", 1, (0,)), ("a", 0, (0,))],
        [("a", 0, (1,))],
        [("a", 0, (2,))],
        [("a", 2, (0,))],
    ]


@pytest.mark.full
def test_whole_weights_have_the_gradient_of_plain_torch_and_go_on(
    rank: TenantRank, model_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    rank.create("w", ModelSpec(rank=0))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    plain = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    for number, loss in enumerate(LOSSES):
        sent = request("w", number, loss)
        results = rank.forward_backward([sent])
        expected, logprobs = plain_pass(model, sent.data, loss)
        assert loss_of(results) == pytest.approx(expected, rel=1e-5)
        for found, each in zip(logprobs_of(results), logprobs, strict=True):
            np.testing.assert_allclose(found, each, atol=1e-5)
        scored = rank.forward_backward([replace(sent, is_forward_only=True)])
        assert loss_of(scored) == pytest.approx(expected, rel=1e-5)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        plain.param_groups[0]["lr"] = STEP.learning_rate
        plain.step()
        plain.zero_grad()
        assert rank.optim_step("w", STEP) == pytest.approx(float(norm), rel=1e-4)
    rank.save("w", tmp_path / "whole", True)
    rank.save("w", tmp_path / "weights", False)
    assert not [*(tmp_path / "weights").glob("optimizer*")]
    assert "holds no optimizer state" in rank.load("u", tmp_path / "weights", True)
    assert rank.load("u", tmp_path / "weights", False) == ""
    assert rank.load("v", tmp_path / "whole", True) == ""
    for name in "wvu":
        rank.forward_backward([request(name, 9)])
        rank.optim_step(name, STEP)
        rank.save(name, tmp_path / name, True)
        rank.drop(name)
    w, v, u = ((tmp_path / name / "model.safetensors").read_bytes() for name in "wvu")
    assert w == v and w != u
