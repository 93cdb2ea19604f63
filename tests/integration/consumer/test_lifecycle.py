"""Scores, exports, checkpoints and refusals of two real trainers, against plain transformers on the same weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.integration.consumer.conftest import LEARNING_RATE, cut, launch_and_check, make_samples, sample_logprobs

MODELS, PRECISIONS = ("tied", "untied"), ("fp32", "bf16")
every_case = pytest.mark.parametrize("case", [(model, precision) for model in MODELS for precision in PRECISIONS])


@pytest.fixture(scope="session")
def out_dir(models: dict[bool, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lifecycle")
    launch_and_check("lifecycle_process.py", directory, *models.values(), world_size=2)
    return directory


@pytest.fixture(scope="session")
def ranks(out_dir: Path) -> list[dict[Any, Any]]:
    return [torch.load(out_dir / f"rank{rank}.pt") for rank in range(2)]


def checkpoint_of(out_dir: Path, case: tuple[str, str]) -> Path:
    return out_dir / f"{case[0]}-{case[1]}" / "step-2"


def plain_scores(model_dir: Path, dtype: torch.dtype) -> Tensor:
    """Log-probabilities of all response tokens of step 0, sample after sample."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        return torch.cat([sample_logprobs(model, sample).float() for sample in make_samples(0)])


def chosen(scores: list[Tensor]) -> Tensor:
    """Scores of packed micro-batches without the places that have none."""
    masks = [torch.tensor(m.loss_mask) for m in cut(make_samples(0), per_micro_batch=4, packed=True)]
    assert all(not score[~mask].any() for score, mask in zip(scores, masks, strict=True))
    return torch.cat([score[mask] for score, mask in zip(scores, masks, strict=True)])


@pytest.mark.parametrize("model", MODELS)
def test_scores_of_packed_samples_are_those_of_each_sample_alone(
    ranks: list[dict[Any, Any]], models: dict[bool, Path], model: str
) -> None:
    expected = plain_scores(models[model == "tied"], torch.float32)
    torch.testing.assert_close(chosen(ranks[0][model, "fp32"]["scores"]), expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("model", MODELS)
def test_scores_in_bfloat16_are_those_of_transformers_in_bfloat16(
    ranks: list[dict[Any, Any]], models: dict[bool, Path], model: str
) -> None:
    scores = chosen(ranks[0][model, "bf16"]["scores"])
    assert scores.dtype == torch.float32
    gap = (scores - plain_scores(models[model == "tied"], torch.bfloat16)).abs()
    assert gap.mean() < 5e-3


@every_case
def test_the_reference_stays_what_it_was_while_the_policy_moves(ranks: list[dict[Any, Any]], case: Any) -> None:
    result = ranks[0][case]
    assert torch.equal(chosen(result["reference"]), chosen(result["scores"]))
    assert torch.equal(chosen(result["reference"]), chosen(result["reference_afterwards"]))
    assert not torch.equal(chosen(result["scores"]), chosen(result["trained_scores"]))


@every_case
def test_a_checkpoint_loads_in_transformers_with_the_trainers_logits(
    ranks: list[dict[Any, Any]], out_dir: Path, case: Any
) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint_of(out_dir, case), attn_implementation="sdpa").eval()
    assert model.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[case[1]]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(make_samples(0)[0].token_ids)[None], use_cache=False).logits
    assert torch.equal(logits, ranks[0][case]["logits"])


@every_case
def test_a_checkpoint_is_complete_and_nothing_is_left_beside_it(out_dir: Path, case: Any) -> None:
    checkpoint = checkpoint_of(out_dir, case)
    assert [path.name for path in checkpoint.parent.iterdir()] == ["step-2"]
    names = {path.name for path in checkpoint.iterdir()}
    assert {"config.json", "model.safetensors", "optimizer.safetensors", "tokenizer.json", "state.json"} <= names
    assert json.loads((checkpoint / "state.json").read_text()) == {"step": 2}


@every_case
def test_exported_weights_are_the_checkpoints_in_the_models_order_and_wire_dtype(
    ranks: list[dict[Any, Any]], out_dir: Path, case: Any
) -> None:
    exported = ranks[0][case]["exported"]
    saved = load_file(checkpoint_of(out_dir, case) / "model.safetensors")
    assert exported.keys() == saved.keys()
    assert ("lm_head.weight" in exported) == (case[0] == "untied")
    assert all(torch.equal(exported[name], tensor.float()) for name, tensor in saved.items())
    in_order = AutoModelForCausalLM.from_pretrained(checkpoint_of(out_dir, case)).state_dict()
    assert list(exported) == [name for name in in_order if name in saved]


@every_case
def test_both_ranks_export_the_same_bytes(ranks: list[dict[Any, Any]], case: Any) -> None:
    first, second = (rank[case]["exported"] for rank in ranks)
    assert all(torch.equal(first[name], second[name]) for name in first)


@every_case
def test_a_resumed_trainer_takes_the_step_that_an_uninterrupted_one_takes(
    ranks: list[dict[Any, Any]], case: Any
) -> None:
    result = ranks[0][case]
    assert all(torch.equal(result["resumed"][name], weight) for name, weight in result["uninterrupted"].items())
    assert any(not torch.equal(result["exported"][name], weight) for name, weight in result["resumed"].items())


@pytest.mark.parametrize("model", MODELS)
def test_bfloat16_steps_on_float32_masters_and_keeps_positions_exact(
    ranks: list[dict[Any, Any]], models: dict[bool, Path], model: str
) -> None:
    result = ranks[0][model, "bf16"]
    start = load_file(models[model == "tied"] / "model.safetensors")
    for name, master in result["masters"].items():
        assert master.dtype == torch.float32
        assert torch.equal(master.bfloat16().float(), result["exported"][name])
        # Two steps of 1e-4 are often less than a weight's last bit in bfloat16, never in float32.
        assert 0.5 * LEARNING_RATE < (master - start[name].bfloat16().float()).abs().max() < 4 * LEARNING_RATE
    assert set(result["buffers"].values()) == {torch.float32}


@every_case
def test_a_gradient_that_overflowed_is_refused_and_no_weight_moves(ranks: list[dict[Any, Any]], case: Any) -> None:
    for rank in ranks:
        assert "the gradient norm is" in rank[case]["refusals"]["step"]
        assert "no step was taken" in rank[case]["refusals"]["step"]
        before, after = rank[case]["uninterrupted"], rank[case]["after_refusal"]
        assert all(torch.equal(before[name], after[name]) for name in before)


@every_case
def test_every_rank_hears_of_a_checkpoint_that_could_not_be_written(ranks: list[dict[Any, Any]], case: Any) -> None:
    assert "could not be written: " in ranks[0][case]["refusals"]["save"]
    assert "could not be written by trainer 0" in ranks[1][case]["refusals"]["save"]


def test_trainers_listen_on_loopback_only(ranks: list[dict[Any, Any]]) -> None:
    for rank in ranks:
        assert rank["listening"] <= {"127.0.0.1"}
    assert ranks[0]["listening"] == {"127.0.0.1"}
