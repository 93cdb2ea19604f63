"""The gradient of an optimizer step is that of its samples, however they are cut and whatever the layout of trainers.

The oracle knows no rows, micro-batches or ranks: plain transformers, one sample at a time, full logits, GRPO as in the
paper, torch's own clipping and AdamW.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.integration.consumer.conftest import (
    LAYOUTS,
    LEARNING_RATE,
    LOSS,
    MAX_GRAD_NORM,
    NUM_STEPS,
    ON_ONE_MODEL,
    WEIGHT_DECAY,
    Sample,
    launch_and_check,
    make_samples,
    sample_logprobs,
    save_model,
)
from tests.integration.consumer.gradient_process import CUTS

TOLERANCE = {"fp32": 1e-5, "bf16": 2.5e-2}  # relative L2 per tensor
NORM_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}
# Of what two steps have made of all float32 masters. AdamW's first steps go by signs, which rounding turns where a
# gradient is nearly 0; a slice that was not stepped on, or with another's gradient, would be about 1.
MASTER_TOLERANCE = {"fp32": 2e-3, "bf16": 0.2}
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
        stepped = {name: p.detach().clone() for name, p in masters.named_parameters()}
        steps.append({"gradients": gradients, "norm": norm, "updates": updates, "masters": stepped})
    return steps


def sharing_out(layout: str, precision: str) -> bool:
    """ZeRO shares out float32 masters of bfloat16 weights; there is no such thing in float32."""
    return not (precision == "fp32" and "zero" in layout)


RUNS = [(name, precision) for name in LAYOUTS for precision in TOLERANCE if sharing_out(name, precision)]
every_run = pytest.mark.parametrize(("layout", "precision"), RUNS)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two architectures, tied and untied."""
    root = tmp_path_factory.mktemp("models")
    return [
        save_model(root / f"{architecture}-{'tied' if tied else 'untied'}", architecture, tied=tied)
        for architecture in ("qwen3", "qwen2")
        for tied in (True, False)
    ]


@pytest.fixture(scope="module")
def expected(paths: list[Path]) -> Callable[[str], dict[str, Steps]]:
    """Precision to the plain steps of each model."""
    return functools.cache(lambda precision: {path.name: plain_training(path, precision) for path in paths})


Ranks = dict[str, list[dict[Any, Any]]]  # model to the results of each rank


@pytest.fixture(scope="module")
def trained(paths: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Ranks]:
    """Layout and precision to results; one launch of trainers for all layouts of a size, which starting dominates."""
    out_dir = tmp_path_factory.mktemp("gradients")

    @functools.cache
    def launch(world_size: int) -> None:
        runs = ",".join(f"{layout}:{precision}" for layout, precision in RUNS if LAYOUTS[layout][0] == world_size)
        launch_and_check("gradient_process.py", out_dir, runs, *paths, world_size=world_size)

    def results(layout: str, precision: str) -> Ranks:
        launch(LAYOUTS[layout][0])
        chosen = paths[:1] if layout in ON_ONE_MODEL else paths
        return {path.name: read_ranks(out_dir, layout, precision, path) for path in chosen}

    return results


def read_ranks(out_dir: Path, layout: str, precision: str, path: Path) -> list[dict[Any, Any]]:
    ranks = range(LAYOUTS[layout][0])
    return [torch.load(out_dir / f"{layout}-{precision}-{path.name}-rank{rank}.pt") for rank in ranks]


def cases(trained: Ranks) -> Iterator[tuple[str, list[dict[Any, Any]], Any]]:
    """Model, ranks, cut."""
    for model, ranks in trained.items():
        assert [case for case in ranks[0] if isinstance(case, tuple)] == CUTS
        for cut in CUTS:
            yield model, ranks, cut


def joined(ranks: list[dict[Any, Any]], case: Any, step: int, what: str) -> dict[str, Tensor]:
    """Full tensors of the whole model: those of each stage, from its head."""
    return {name: tensor for rank in ranks for name, tensor in rank[case][step][what].items()}


def differences(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, float]:
    assert left.keys() == right.keys()
    return {name: float((left[name] - right[name]).norm() / right[name].norm()) for name in right}


@every_run
def test_every_cut_gives_the_plain_gradient_and_norm_for_two_steps(
    trained: Callable[..., Ranks], expected: Callable[..., Any], layout: str, precision: str
) -> None:
    for model, ranks, cut in cases(trained(layout, precision)):
        for step, right in enumerate(expected(precision)[model]):
            found = differences(joined(ranks, cut, step, "gradients"), right["gradients"])
            assert max(found.values()) < TOLERANCE[precision], (model, cut, step, found)
            for rank in ranks:
                assert rank[cut][step]["norm"] == pytest.approx(right["norm"], rel=NORM_TOLERANCE[precision])
                assert rank[cut][step]["norm"] > MAX_GRAD_NORM


@pytest.mark.parametrize("layout", [name for name, precision in RUNS if precision == "fp32"])
def test_every_cut_steps_as_plain_training_does(
    trained: Callable[..., Ranks], expected: Callable[..., Any], layout: str
) -> None:
    for model, ranks, cut in cases(trained(layout, "fp32")):
        for step, right in enumerate(expected("fp32")[model]):
            # The update follows signs of gradients that may be noise; this compares learning rate, decay and clipping.
            found = differences(joined(ranks, cut, step, "updates"), right["updates"])
            assert max(found.values()) < UPDATE_TOLERANCE, (model, cut, step, found)


@every_run
def test_the_optimizer_moves_its_masters_where_plain_training_moves_them(
    paths: list[Path], trained: Callable[..., Ranks], expected: Callable[..., Any], layout: str, precision: str
) -> None:
    starts = {path.name: AutoModelForCausalLM.from_pretrained(path).state_dict() for path in paths}
    for model, ranks, cut in cases(trained(layout, precision)):
        found, right = joined(ranks, cut, NUM_STEPS - 1, "masters"), expected(precision)[model][-1]["masters"]
        assert found.keys() == right.keys()
        moved = torch.cat([(right[name] - starts[model][name]).flatten() for name in right])
        apart = torch.cat([(found[name] - right[name]).flatten() for name in right])
        assert apart.norm() < MASTER_TOLERANCE[precision] * moved.norm(), (model, cut)


@every_run
def test_ranks_that_hold_the_same_weights_keep_them_bit_equal(
    trained: Callable[..., Ranks], layout: str, precision: str
) -> None:
    for model, ranks, cut in cases(trained(layout, precision)):
        seen: dict[Any, str] = {}
        for rank in ranks:
            _, _, tp_rank = rank["layout"]
            for name, digest in rank[cut][-1]["weights"].items():
                # Over data-parallel copies and, if tied, over stages; over tensor ranks if it is not cut.
                place = name if name in rank["replicated"] else (name, tp_rank)
                assert seen.setdefault(place, digest) == digest, (model, cut, name)
        assert len({rank[cut][0]["norm"] for rank in ranks}) == 1


@every_run
def test_ranks_with_the_lm_head_report_the_same_keys(
    trained: Callable[..., Ranks], layout: str, precision: str
) -> None:
    for _, ranks, cut in cases(trained(layout, precision)):
        last_stage = max(rank["layout"][1] for rank in ranks)
        for rank in ranks:
            keys = set(rank[cut][0]["keys"])
            assert keys >= {"loss_sum", "kl_sum", "num_tokens"} if rank["layout"][1] == last_stage else not keys


def test_other_architectures_sliding_windows_and_uneven_stages(tmp_path: Path) -> None:
    paths = [
        save_model(tmp_path / "llama", "llama", tied=False, num_hidden_layers=3, attention_bias=True),
        save_model(tmp_path / "mistral", "mistral", tied=True, num_hidden_layers=3, sliding_window=5),
    ]
    launch_and_check("gradient_process.py", tmp_path, "tp2_pp2:fp32", *paths, world_size=4)
    for model, ranks, cut in cases({path.name: read_ranks(tmp_path, "tp2_pp2", "fp32", path) for path in paths}):
        for step, right in enumerate(plain_training(tmp_path / model)):
            found = differences(joined(ranks, cut, step, "gradients"), right["gradients"])
            assert max(found.values()) < TOLERANCE["fp32"], (model, cut, step, found)


@pytest.mark.parametrize(
    ("layout", "fault"),
    [("dp2", "wrong_denominator"), ("tp2", "dropped_q_norm_sum"), ("pp2", "undivided_pipeline")],
)
def test_a_fault_in_the_trainer_is_noticed(
    paths: list[Path], expected: Callable[..., Any], tmp_path: Path, layout: str, fault: str
) -> None:
    launch_and_check("gradient_process.py", tmp_path, f"{layout}:fp32", paths[0], fault, world_size=LAYOUTS[layout][0])
    ranks = read_ranks(tmp_path, layout, "fp32", paths[0])
    found = differences(joined(ranks, CUTS[0], 0, "gradients"), expected("fp32")[paths[0].name][0]["gradients"])
    assert max(found.values()) > 1000 * TOLERANCE["fp32"]
    if fault == "dropped_q_norm_sum":
        wrong = {name for name, difference in found.items() if difference > TOLERANCE["fp32"]}
        assert {name.rsplit(".", 2)[1] for name in wrong} == {"q_norm", "k_norm"}
