"""Test scores, exports, checkpoints and refusals of trainers in every layout against plain transformers."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from coati_rl.checkpoint.directory import read_state
from tests.integration.consumer.conftest import EVERY_LAYOUT, LEARNING_RATE, save_model
from tests.integration.consumer.lifecycle_cases import CASES, MODELS, RESUMES, is_fast
from tests.integration.consumer.lifecycle_process import RECOMPUTED, WIRE, Case, Resume, run_tasks
from tests.integration.consumer.samples import cut, make_samples, sample_logprobs
from tests.integration.consumer.trainer_server import LAUNCH_TIMEOUT_S, TrainerServers

pytestmark = pytest.mark.timeout(LAUNCH_TIMEOUT_S)  # whichever test is first waits for all launches

Results = list[dict[str, Any]]  # by rank


def marked(tasks: Sequence[Case | Resume]) -> list[Any]:
    return [pytest.param(task, marks=[] if is_fast(task) else pytest.mark.full) for task in tasks]


@pytest.fixture(scope="module")
def out_dir(request: pytest.FixtureRequest, trainers: TrainerServers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A launch for each number of trainers, the most first: resumes go on from lives of as many trainers or more."""
    directory = tmp_path_factory.mktemp("lifecycle")
    for name, architecture in MODELS.items():
        # Dropout in the configuration is for transformers' own trainers; ours compares with a model in eval mode.
        save_model(directory / name, architecture, tied=name == "tied", attention_dropout=0.5)
    due = [task for task in (*CASES, *RESUMES) if is_fast(task) or request.config.getoption("--all")]
    for world_size in (4, 3, 2, 1):
        tasks = [task for task in due if EVERY_LAYOUT[task.layout][0] == world_size]
        if tasks:
            trainers.launch_and_check(run_tasks, directory, tasks, world_size=world_size)
    return directory


@functools.cache
def load(directory: Path, name: str) -> Results:
    return [torch.load(path) for path in sorted(directory.glob(f"{name}-rank*.pt"))]


class Life:
    """Hold the output of one case."""

    def __init__(self, out_dir: Path, case: Case) -> None:
        self.case = case
        self.model_dir = out_dir / case.model
        self.directory = out_dir / "-".join(case)
        self.checkpoint = self.directory / "step-2"
        self.ranks = load(self.directory, "life")

    @property
    def with_head(self) -> Results:
        return [rank for rank in self.ranks if rank["has_head"]]


@pytest.fixture(params=marked(CASES), ids="-".join)
def life(request: pytest.FixtureRequest, out_dir: Path) -> Life:
    return Life(out_dir, request.param)


def whole(ranks: Results, *keys: str) -> dict[str, Tensor]:
    """Return the tensors of all stages' head ranks, first to last."""
    return {
        name: tensor
        for rank in ranks
        for name, tensor in functools.reduce(lambda found, key: found[key], keys, rank).items()
    }


def all_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def tensors_in(checkpoint: Path) -> dict[str, Tensor]:
    """Weights, and what the optimizer knows of them, under kind/name."""
    return {name: tensor for path in checkpoint.glob("*.safetensors") for name, tensor in load_file(path).items()}


def plain_model(directory: Path, **settings: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, **settings).eval()


def chosen(scores: list[Tensor]) -> Tensor:
    """Scores of packed micro-batches without the places that have none."""
    masks = [torch.tensor(m.loss_arrays["loss_mask"]) for m in cut(make_samples(0), per_micro_batch=4, packed=True)]
    assert all(not score[~mask].any() for score, mask in zip(scores, masks, strict=True))
    return torch.cat([score[mask] for score, mask in zip(scores, masks, strict=True)])


def digest(weights: dict[str, Tensor]) -> str:
    """xxh3-128 of all bytes, tensor after tensor."""
    hasher = xxhash.xxh3_128()
    for tensor in weights.values():
        hasher.update(tensor.contiguous().view(torch.uint8).numpy())
    return hasher.hexdigest()


def test_scores_of_packed_samples_are_those_of_each_sample_alone(life: Life) -> None:
    model = plain_model(life.model_dir, dtype=WIRE[life.case.precision], attn_implementation="eager")
    with torch.no_grad():
        expected = torch.cat([sample_logprobs(model, sample).float() for sample in make_samples(0)])
    for rank in life.with_head:
        scores = chosen(rank["scores"][0]["policy"])
        assert scores.dtype == torch.float32
        if life.case.precision == "fp32":
            torch.testing.assert_close(scores, expected, rtol=0, atol=5e-6)
        else:
            assert (scores - expected).abs().mean() < 5e-3
    headless = [scores for rank in life.ranks if not rank["has_head"] for scores in rank["scores"]]
    assert all(scores == {"policy": [], "old": [], "reference": []} for scores in headless)


def test_reference_old_policy_and_kept_weights_stay_what_they_were_while_the_policy_moves(life: Life) -> None:
    """The old policy is the start model, until after the first step it is kept anew, as is a version."""
    for rank in life.with_head:
        start, first, second = ({model: chosen(found) for model, found in step.items()} for step in rank["scores"])
        for found in (start["reference"], start["old"], first["reference"], first["old"], second["reference"]):
            assert torch.equal(found, start["policy"])
        assert torch.equal(second["old"], first["policy"]) and torch.equal(chosen(rank["kept"]), first["policy"])
        assert not torch.equal(first["policy"], start["policy"])
        assert not torch.equal(second["policy"], first["policy"])


def test_a_step_without_samples_changes_nothing(life: Life) -> None:
    """Neither weights nor masters; that the optimizer forgets nothing either shows in the step that a resume takes."""
    for kind in ("exported", "masters"):
        assert all_equal(whole(life.ranks, "after_empty_steps", kind), whole(life.ranks, "saved", kind))
    for rank in life.ranks:
        empty, uncounted = rank["empty_steps"]
        assert empty["grad_norm"] == uncounted["grad_norm"] == 0
        if rank["has_head"]:
            assert empty["loss"] is uncounted["loss"] is None
            assert empty["entropy_mean"] is empty["clip_fraction"] is None
            assert uncounted["entropy_mean"] > 0


def test_exported_weights_are_those_that_transformers_reads_from_the_checkpoint(life: Life) -> None:
    exported = whole(life.ranks, "saved", "exported")
    state = plain_model(life.checkpoint).state_dict()
    saved = {n: t for n, t in state.items() if life.case.model == "untied" or n != "lm_head.weight"}
    assert list(exported) == list(saved)
    assert {tensor.dtype for tensor in exported.values()} == {WIRE[life.case.precision]}
    assert all_equal(exported, saved)
    assert digest(exported) == digest(saved)
    senders = {name: rank["stage"] for rank in life.ranks for name in rank["saved"]["exported"]}
    manifest = [(name, tuple(saved[name].shape), senders[name]) for name in saved]
    assert all(rank["manifest"] == manifest for rank in life.ranks)


def test_a_checkpoint_loads_in_transformers_with_the_logits_of_the_exported_weights(life: Life) -> None:
    dtype = WIRE[life.case.precision]
    saved, built = plain_model(life.checkpoint), plain_model(life.model_dir, dtype=dtype)
    assert saved.dtype == dtype
    built.load_state_dict(whole(life.ranks, "saved", "exported"), strict=life.case.model == "untied")
    token_ids = torch.tensor(make_samples(0)[0].token_ids)[None]
    with torch.no_grad():
        assert torch.equal(saved(input_ids=token_ids).logits, built(input_ids=token_ids).logits)


def test_a_checkpoint_is_complete_and_nothing_else_has_its_name(life: Life) -> None:
    assert read_state(life.checkpoint)["step"] == 2  # which compares every byte with the manifest
    names = {path.name for path in life.checkpoint.iterdir()}
    assert {"config.json", "tokenizer.json", "manifest.json", "state.json"} <= names
    index = json.loads((life.checkpoint / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2, "of each rank that writes"
    assert {name for name in names if name.endswith(".safetensors")} == files | {
        name.replace("model-", "optimizer-") for name in files
    }
    assert [path.name for path in life.directory.glob("step-*")] == ["step-2"]


def test_a_resumed_trainer_that_gave_its_memory_up_takes_the_step_of_an_uninterrupted_one(life: Life) -> None:
    for kind in ("exported", "masters"):
        assert all_equal(whole(life.ranks, "resumed", kind), whole(life.ranks, "uninterrupted", kind))
    assert [rank["resumed_sums"] for rank in life.ranks] == [rank["sums"] for rank in life.ranks]
    assert not all_equal(whole(life.ranks, "uninterrupted", "masters"), whole(life.ranks, "saved", "masters"))


def test_a_checkpoint_from_before_any_optimizer_step_resumes_bit_for_bit(life: Life) -> None:
    """As of a run whose first steps had no sample in the loss: the optimizer has no state yet."""
    assert read_state(life.directory / "untrained" / "step-0")["step"] == 0
    assert not any(name.startswith("exp_avg") for name in tensors_in(life.directory / "untrained" / "step-0"))
    for kind in ("exported", "masters"):
        assert all_equal(whole(life.ranks, "first_step_of_resumed", kind), whole(life.ranks, "first_step", kind))


def test_weights_that_are_kept_for_a_replay_are_those_of_a_checkpoint_and_only_the_last_stay(life: Life) -> None:
    kept = life.directory / "kept"
    assert sorted(path.name for path in kept.iterdir()) == ["step-1", "step-2"]
    assert read_state(kept / "step-2")["step"] == 2
    weights = {name: tensor for name, tensor in tensors_in(life.checkpoint).items() if "/" not in name}
    assert all_equal(tensors_in(kept / "step-2"), weights)


def test_steps_are_taken_on_float32_masters_and_positions_stay_exact(life: Life) -> None:
    start, masters = load_file(life.model_dir / "model.safetensors"), whole(life.ranks, "saved", "masters")
    assert masters.keys() == start.keys()
    for name, master in masters.items():
        assert master.dtype == torch.float32
        # Two steps of 1e-4 are often less than a weight's last bit in bfloat16, never in float32.
        assert 0.5 * LEARNING_RATE < (master - start[name]).abs().max() < 4 * LEARNING_RATE
    rounded = {name: master.to(WIRE[life.case.precision]) for name, master in masters.items()}
    assert all_equal(rounded, whole(life.ranks, "saved", "exported"))
    assert all(set(rank["buffers"].values()) == {torch.float32} for rank in life.ranks)


def test_a_gradient_that_overflowed_is_refused_on_every_rank_and_no_weight_moves(life: Life) -> None:
    for rank in life.ranks:
        assert "the gradient norm is" in rank["refusals"]["step"]
        assert "no step was taken" in rank["refusals"]["step"]
    assert all_equal(whole(life.ranks, "after_refusal", "masters"), whole(life.ranks, "uninterrupted", "masters"))


@pytest.mark.parametrize("refused", ["begin", "write"])
def test_every_rank_hears_of_a_checkpoint_that_one_could_not_write(life: Life, refused: str) -> None:
    """The first rank could not begin; the head of the last stage could not write its file."""
    failing = {"tp2_pp2": 2, "pp2": 1, "cp2_pp2": 1}.get(life.case.layout, 0) if refused == "write" else 0
    for rank, result in enumerate(life.ranks):
        message = result["refusals"][refused]
        assert "cannot be written: " in message, "the cause, on every rank"
        assert message.startswith("checkpoint " if rank == failing else f"trainer {failing}: checkpoint ")


@pytest.mark.parametrize("case", marked([case for case in CASES if case.layout in RECOMPUTED]), ids="-".join)
def test_activations_that_are_computed_again_give_the_same_gradients(out_dir: Path, case: Case) -> None:
    for rank in Life(out_dir, case).ranks:
        assert all_equal(rank["gradients, True"], rank["gradients, False"])
        assert (rank["layers, False"], rank["layers, True"]) == (4, 8)  # one layer here, 4 micro-batches


def test_trainers_listen_on_loopback_only(life: Life) -> None:
    assert all(rank["listening"] <= {"127.0.0.1"} for rank in life.ranks)
    assert life.ranks[0]["listening"] == {"127.0.0.1"}


class Resumed:
    """One resume, and the life whose checkpoint it goes on from."""

    def __init__(self, out_dir: Path, resume: Resume) -> None:
        self.life = Life(out_dir, Case(resume.from_layout, resume.from_precision, resume.model))
        name = f"resumed-{resume.layout}-{resume.precision}"
        self.saved_again = self.life.directory / name / "step-2"
        self.ranks = load(self.life.directory, name)
        self.precision = resume.precision
        # Relative L2 of the update. Float32: it is 1e-4 on weights near 0.1, whose last bit of 7e-9 may fall either
        # way. bfloat16 to itself: another order of sums, rounded to 8 bits. To bfloat16: what rounding does to a
        # third of the gradients. A lost optimizer state is one of 1.4.
        same = resume.precision == resume.from_precision
        self.tolerance = (1e-5 if resume.precision == "fp32" else 1e-2) if same else 4e-2
        self.sums_tolerance = 1e-6 if same else 1e-3


@pytest.fixture(params=marked(RESUMES), ids="-".join)
def resumed(request: pytest.FixtureRequest, out_dir: Path) -> Resumed:
    return Resumed(out_dir, request.param)


def test_what_another_layout_restores_is_what_was_saved_bit_for_bit(resumed: Resumed) -> None:
    """Saved again before any step, it is the same checkpoint; bfloat16 has the float32 weights as its masters."""
    saved, again = tensors_in(resumed.life.checkpoint), tensors_in(resumed.saved_again)
    if resumed.life.case.precision != resumed.precision:
        weights = {name: tensor for name, tensor in saved.items() if "/" not in name}
        saved |= {f"master/{name}": tensor for name, tensor in weights.items()}
        saved |= {name: tensor.to(WIRE[resumed.precision]) for name, tensor in weights.items()}
    assert all_equal(again, {name: saved[name] for name in again})
    assert again.keys() == saved.keys()


def test_another_layout_takes_the_step_that_the_saved_one_takes(resumed: Resumed) -> None:
    saved = whole(resumed.life.ranks, "saved", "masters")
    expected, got = whole(resumed.life.ranks, "uninterrupted", "masters"), whole(resumed.ranks, "state", "masters")
    assert got.keys() == expected.keys()
    updates = [torch.cat([(w[name] - saved[name]).flatten() for name in saved]) for w in (got, expected)]
    assert (updates[0] - updates[1]).norm() / updates[1].norm() < resumed.tolerance
    (expected_sums, *_), (sums, *_) = (
        [rank["sums"] for rank in ranks if "loss_sum" in rank["sums"]] for ranks in (resumed.life.ranks, resumed.ranks)
    )
    assert sums.keys() == expected_sums.keys()
    for name in ("num_tokens", "loss_sum", "entropy_sum", "gap_tokens"):
        assert sums[name] == pytest.approx(expected_sums[name], rel=resumed.sums_tolerance), name
