"""Test that adapters have the gradients of transformers and PEFT in every layout, and go on from a checkpoint.

The oracle is a PEFT model of transformers, one sample at a time in float32, with the plain formulas of the losses. The
adapters that trials begin with were written by PEFT. Those of mixtures of experts are beside all their linear layers.
"""

import copy
import functools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from coati_rl.checkpoint.directory import load_state
from coati_rl.checkpoint.saved_adapter import recorded_weights
from coati_rl.model_files.adapter_files import PREFIX
from coati_rl.model_files.identity import model_identity
from tests.integration.consumer import reward_cases
from tests.integration.consumer.adapter_process import (
    ELSEWHERE,
    MERGED,
    NUM_SCORED,
    SCORED,
    SPEC,
    START,
    Trial,
    take_trials,
    whole,
    worst_of,
)
from tests.integration.consumer.conftest import LAYOUTS, MAX_GRAD_NORM, save_model
from tests.integration.consumer.expert_models import EXPERTS, MISREAD, cuts_of, linear_layers_alone
from tests.integration.consumer.gradient_matrix import CASES
from tests.integration.consumer.launches import launched
from tests.integration.consumer.losses import Cut
from tests.integration.consumer.plain_training import plain_gradients
from tests.integration.consumer.samples import plain_model, sample_logprobs, samples_near
from tests.integration.consumer.trainer_server import LAUNCH_TIMEOUT_S, TrainerServers

pytestmark = pytest.mark.timeout(LAUNCH_TIMEOUT_S)
TOLERANCE = {"fp32": 1e-5, "bf16": 2.5e-2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-tied": ("qwen3", {"tied": True}),
    "qwen2-untied": ("qwen2", {"tied": False}),
    "llama-untied": ("llama", {"tied": False, "attention_bias": True}),
    "mistral-tied": ("mistral", {"tied": True, "sliding_window": 5}),
}
OF_TRIALS = (*LAYOUTS, "cp2", "cp2_fsdp2", "cp2_tp2", "fsdp2_tp2", "fsdp2_tp2_dp2", "fsdp2_dp2_copies2")
LOSSES = ("clip", "cross-entropy", "dpo", "pairwise", "value")
CUTS = (Cut(1, True, "one"), Cut(2, True, "uneven"), Cut(2, False, "one"), Cut(4, True, "one", shared=True))


def cut_of(loss: str, number: int) -> Cut:
    """Samples of reward models share nothing."""
    return CUTS[number % 3] if loss in reward_cases.CASES else CUTS[number % 4]


def trials() -> list[Trial]:
    """Every loss in every layout, with the models and the cuts in turn."""
    names = list(MODELS)
    return [
        Trial(
            layout,
            "bf16" if "zero" in layout else "fp32",
            names[(place + number) % len(names)],
            loss,
            cut_of(loss, place + number // 2),
        )
        for place, layout in enumerate(OF_TRIALS)
        for number, loss in enumerate(LOSSES)
    ]


DENSE_TRIALS = trials()
OF_EXPERTS = [("dp1", model) for model in EXPERTS]
OF_EXPERTS += [(layout, "qwen2_moe") for layout in ("dp2", "ep2")]
OF_EXPERTS += [
    (layout, "qwen3_moe, some dense") for layout in ("dp2", "ep2", "ep2_dp2", "fsdp2_dp2", "tp2", "pp2", "cp2_ep2")
]
EXPERT_TRIALS = [
    Trial(layout, "fp32", model, LOSSES[number % 3], cuts_of(model)[number % len(cuts_of(model))])
    for number, (layout, model) in enumerate(OF_EXPERTS)
]
TRIALS = [*DENSE_TRIALS, *EXPERT_TRIALS]
FAST = [each for each in DENSE_TRIALS if each.layout == "dp1" and each.loss != "clip"]
FAST_BEYOND_ONE = {("tp2", "clip"), ("pp2", "cross-entropy")}  # which go on in FSDP2 and in data-parallel copies
FAST += [each for each in DENSE_TRIALS if (each.layout, each.loss) in FAST_BEYOND_ONE]
FAST += EXPERT_TRIALS[:1]


@pytest.fixture(scope="module")
def due(request: pytest.FixtureRequest) -> list[Trial]:
    return TRIALS if request.config.getoption("--all") else FAST


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, due: list[Trial]) -> Path:
    models = tmp_path_factory.mktemp("models")
    for name in dict.fromkeys(each.model for each in due):
        architecture, settings = (MODELS | EXPERTS)[name]
        directory = save_model(models / name, architecture, **settings)
        uses = {each.is_scored for each in due if each.model == name}
        if False in uses:
            save_adapted(directory, AutoModelForCausalLM.from_pretrained(directory), "CAUSAL_LM")
        if True not in uses:
            continue
        scored = reward_cases.save_reward_model(directory / SCORED, architecture, tied=settings["tied"])
        save_adapted(scored, AutoModelForSequenceClassification.from_pretrained(scored), "SEQ_CLS")
    return models


def save_adapted(directory: Path, model: PreTrainedModel, task: str) -> None:
    """Adapters whose numbers bfloat16 can hold, as PEFT writes them, and the model with them."""
    torch.manual_seed(5)
    config = peft.LoraConfig(r=SPEC.rank, lora_alpha=SPEC.alpha, target_modules="all-linear", task_type=task)
    with linear_layers_alone(model):
        adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.03)
            if parameter.requires_grad:
                parameter.copy_(parameter.bfloat16())
    adapted.save_pretrained(directory / START)
    copy.deepcopy(adapted).merge_and_unload().save_pretrained(directory / MERGED)


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, trainers: TrainerServers, models: Path, due: list[Trial]
) -> tuple[Path, dict[Trial, list[dict[str, Any]]]]:
    """The directory of the checkpoints, and what each rank recorded."""
    out_dir = tmp_path_factory.mktemp("adapters")
    return out_dir, launched(trainers, take_trials, out_dir, models, due)


def marked(trials: list[Trial]) -> list[Any]:
    return [pytest.param(each, id=each.name, marks=[] if each in FAST else pytest.mark.full) for each in trials]


every_trial = pytest.mark.parametrize("trial", marked(TRIALS))


def adapted_model(trial: Trial, model_dir: Path, adapter: Path) -> Any:
    """By transformers and PEFT."""
    if trial.is_scored:
        base: Any = reward_cases.plain_model(reward_cases.CASES[trial.loss], model_dir)
    else:
        eager: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
        base = AutoModelForCausalLM.from_pretrained(model_dir, **eager)
    with linear_layers_alone(base) if trial.model in MISREAD else nullcontext():
        return peft.PeftModel.from_pretrained(base, adapter, is_trainable=True).eval()


def our_name(name: str) -> str:
    """Of PEFT's parameter."""
    return name.removeprefix("base_model.model.").replace(".default.", ".").replace("modules_to_save.", "")


@functools.cache
def right_gradients(trial: Trial, model_dir: Path) -> dict[str, Tensor]:
    model = adapted_model(trial, model_dir, model_dir / START)
    if trial.is_scored:
        case = reward_cases.CASES[trial.loss]
        case.plain_loss(model.base_model.model, case.samples(0)).backward()
    else:
        of_loss = CASES[trial.loss]
        samples = samples_near(model_dir / MERGED, 0, recomputes_old=of_loss.recomputes_old, kind=of_loss.kind)
        with torch.no_grad():
            reference = tuple(sample_logprobs(plain_model(model_dir), sample) for sample in samples)
        frozen = [p for p in model.parameters() if not p.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        _, gradients = plain_gradients(model, samples, reference, of_loss.formula, of_loss.aggregation, of_loss.unit)
        return {our_name(name): each for name, each in gradients.items() if "lora_" in name}
    trained = {our_name(name): p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {name: gradient for name, gradient in trained.items() if gradient is not None}


@every_trial
def test_every_adapter_s_gradient_is_peft_s(trial: Trial, found: Any, models: Path) -> None:
    ranks, right = found[1][trial], right_gradients(trial, trial.model_dir(models))
    joined = whole(ranks, "first", "gradients")
    worst = worst_of(joined, right)
    assert worst[0] < TOLERANCE[trial.precision], worst
    norm = float(torch.cat([gradient.flatten() for gradient in joined.values()]).norm())
    for rank in ranks:
        assert rank["first"]["norm"] == pytest.approx(norm, rel=1e-5)
        assert norm > MAX_GRAD_NORM


@every_trial
def test_a_step_from_the_checkpoint_has_the_same_bits(trial: Trial, found: Any) -> None:
    for rank in found[1][trial]:
        for kind in ("merged", "trained", "gradients"):
            second, again = rank["second"][kind], rank["resumed"][kind]
            assert second.keys() == again.keys()
            assert all(torch.equal(second[name], each) for name, each in again.items()), kind
        assert rank["second"]["norm"] == rank["resumed"]["norm"]


@pytest.mark.parametrize("trial", marked([each for each in TRIALS if each.layout in ELSEWHERE]))
def test_a_step_from_the_checkpoint_in_another_layout_is_the_same_step(trial: Trial, found: Any) -> None:
    ranks = found[1][trial]
    before, here, there = (whole(ranks, what, "trained") for what in ("first", "second", "elsewhere"))
    assert here.keys() == there.keys()
    moved = torch.cat([(here[name] - before[name]).flatten() for name in here]).norm()
    apart = torch.cat([(there[name] - here[name]).flatten() for name in here]).norm()
    assert apart < {"fp32": 1e-3, "bf16": 0.1}[trial.precision] * moved
    for rank in ranks:
        assert rank["elsewhere"]["norm"] == pytest.approx(rank["second"]["norm"], rel=TOLERANCE[trial.precision])


@every_trial
def test_peft_reads_the_checkpoint_as_what_was_trained(trial: Trial, found: Any, models: Path, tmp_path: Path) -> None:
    out_dir, results = found
    ranks, saved, model_dir = results[trial], out_dir / trial.name / "step-1", trial.model_dir(models)
    trained = whole(ranks, "first", "trained")
    model = adapted_model(trial, model_dir, saved)
    loaded = {our_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    assert loaded.keys() == trained.keys()
    assert all(torch.equal(loaded[name].to(each.dtype), each) for name, each in trained.items())
    alone, stored = whole(ranks, "first", "alone"), load_file(saved / "adapter_model.safetensors")
    assert [*alone] == [name for name in alone if "lora_" in name] and {*stored} - {*alone} <= {f"{PREFIX}score.weight"}
    assert all(torch.equal(each, stored[name].float()) for name, each in alone.items())
    assert not list(saved.glob("model*.safetensors")) and not (saved / "config.json").exists()
    assert load_state(saved)["weights"] == recorded_weights(saved, model_identity(model_dir))
    moments = {key for path in saved.glob("optimizer*.safetensors") for key in load_file(path)}
    assert {key.partition("/")[2] for key in moments} == trained.keys()
    exported = checkpoint_of(model.float().merge_and_unload(), tmp_path)
    merged = whole(ranks, "first", "merged")
    tolerance = 1e-6 if trial.precision == "fp32" else 2**-7
    for name, weight in merged.items():
        torch.testing.assert_close(weight, exported[name], rtol=tolerance, atol=tolerance)
    base = model_dir / "lm" if trial.is_scored else model_dir
    assert any(not torch.equal(weight, load_base(base)[name]) for name, weight in merged.items() if "proj" in name)


def checkpoint_of(model: PreTrainedModel, directory: Path) -> dict[str, Tensor]:
    """By the names that the tensors have in files, as transformers writes them."""
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


@functools.cache
def load_base(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def has_scores(trial: Trial) -> bool:
    """Where each rank has all samples."""
    return not trial.is_scored and "dp2" not in trial.layout and not trial.layout.startswith("ep2")


@pytest.mark.parametrize("trial", marked([each for each in TRIALS if has_scores(each)]))
def test_reference_and_old_policy_are_exactly_the_base_and_the_policy_before(
    trial: Trial, found: Any, models: Path
) -> None:
    model_dir = trial.model_dir(models)
    samples = samples_near(model_dir / MERGED, 0)[:NUM_SCORED]
    with torch.no_grad():
        base = [sample_logprobs(plain_model(model_dir), sample) for sample in samples]
        merged = [sample_logprobs(plain_model(model_dir / MERGED), sample) for sample in samples]
    bound = 1e-5 if trial.precision == "fp32" else 0.1
    for rank in found[1][trial]:
        start, middle, end = (rank[f"{when} scores"] for when in ("start", "middle", "end"))
        assert all(torch.equal(a, b) for a, b in zip(start["reference"], end["reference"], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(middle["old"], end["old"], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(middle["policy"], end["old"], strict=True))
        for scores, right in ((start["reference"], base), (start["policy"], merged)):
            for score, exact in zip(scores, right, strict=bool(scores)):
                torch.testing.assert_close(score[0], exact, rtol=0, atol=bound)
        if end["policy"]:
            assert not torch.equal(end["policy"][0], end["old"][0])


def test_trials_meet_every_model_and_cut() -> None:
    assert {trial.model for trial in FAST} == {*MODELS, EXPERT_TRIALS[0].model}
    assert {trial.model for trial in TRIALS} == {*MODELS, *EXPERTS}
    assert {trial.loss for trial in FAST} == {*LOSSES}
    assert {trial.cut for trial in FAST} == {*CUTS, EXPERT_TRIALS[0].cut}
    assert {(trial.layout, trial.loss) for trial in DENSE_TRIALS} == {
        (layout, loss) for layout in OF_TRIALS for loss in LOSSES
    }
