"""Test that adapters of a base in 4 bits have the gradients of transformers, PEFT and bitsandbytes, and are resumed.

The oracle is a PEFT model of transformers' quantized one, one sample at a time in float32.
"""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from coati_rl.checkpoint.directory import load_state
from coati_rl.checkpoint.saved_adapter import check_saved_adapter
from coati_rl.config.cli import parse
from coati_rl.errors import ConfigError
from tests.integration.consumer.adapter_process import (
    MERGED,
    NUM_SCORED,
    SPEC,
    START,
    Trial,
    take_trials,
    whole,
    worst_of,
)
from tests.integration.consumer.conftest import save_model
from tests.integration.consumer.gradient_matrix import CASES
from tests.integration.consumer.launches import launched
from tests.integration.consumer.losses import Cut
from tests.integration.consumer.plain_training import plain_gradients
from tests.integration.consumer.samples import sample_logprobs, samples_near
from tests.integration.consumer.test_adapters import our_name, save_adapted
from tests.integration.consumer.trainer_server import LAUNCH_TIMEOUT_S, TrainerServers

pytestmark = pytest.mark.timeout(LAUNCH_TIMEOUT_S)
TOLERANCE = {"fp32": 1e-5, "bf16": 2.5e-2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-tied": ("qwen3", {"tied": True}),
    "llama-untied": ("llama", {"tied": False, "attention_bias": True}),
}
ALONE, SHARED = Cut(1, True, "one"), Cut(4, True, "one", shared=True)
FAST = [
    Trial("dp1", "fp32", "qwen3-tied", "clip", SHARED, has_four_bits=True),
    Trial("dp1", "bf16", "llama-untied", "clip", ALONE, has_four_bits=True),
]
TRIALS = [
    *FAST,
    Trial("dp2", "fp32", "llama-untied", "dpo", ALONE, has_four_bits=True),
    Trial("pp2", "fp32", "qwen3-tied", "clip", ALONE, has_four_bits=True),
    Trial("pp2_dp2", "fp32", "llama-untied", "clip", ALONE, has_four_bits=True),
    *(
        Trial(layout, "bf16", "qwen3-tied", "clip", ALONE, has_four_bits=True)
        for layout in ("zero1_dp2", "zero2_dp2", "pp2_zero1_dp2")
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    for name, (architecture, settings) in MODELS.items():
        directory = save_model(models / name, architecture, **settings)
        save_adapted(directory, AutoModelForCausalLM.from_pretrained(directory), "CAUSAL_LM")
    return models


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, trainers: TrainerServers, models: Path
) -> tuple[Path, dict[Trial, list[dict[str, Any]]]]:
    """The directory of the checkpoints, and what each rank recorded."""
    out_dir = tmp_path_factory.mktemp("four-bits")
    due = TRIALS if request.config.getoption("--all") else FAST
    return out_dir, launched(trainers, take_trials, out_dir, models, due)


every_trial = pytest.mark.parametrize(
    "trial", [pytest.param(each, id=each.name, marks=[] if each in FAST else pytest.mark.full) for each in TRIALS]
)


def quantized_model(model_dir: Path, precision: str = "fp32") -> Any:
    """By transformers; in training mode, as bitsandbytes computes in bfloat16 on some CPUs otherwise."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return AutoModelForCausalLM.from_pretrained(
        model_dir, attn_implementation="eager", dtype=dtype, quantization_config=settings
    ).train()


def adapted_model(model_dir: Path, adapter: Path) -> Any:
    return peft.PeftModel.from_pretrained(quantized_model(model_dir), adapter, is_trainable=True).train()


def base_weights(model: Any) -> dict[str, Tensor]:
    """Of a quantized model: what its layers compute with."""
    found = {}
    for name, parameter in model.named_parameters():
        state = getattr(parameter, "quant_state", None)
        found[name] = parameter if state is None else dequantize_4bit(parameter.data, state)
    return found


@torch.no_grad()
def whole_model(model_dir: Path) -> PreTrainedModel:
    """The base as a plain model."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager").eval()
    weights = base_weights(quantized_model(model_dir))
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])
    return model


@every_trial
def test_every_adapter_s_gradient_is_that_of_peft_on_the_same_base(trial: Trial, found: Any, models: Path) -> None:
    model_dir, case = trial.model_dir(models), CASES[trial.loss]
    samples = samples_near(model_dir / MERGED, 0, recomputes_old=case.recomputes_old, kind=case.kind)
    with torch.no_grad():
        base = whole_model(model_dir)
        reference = tuple(sample_logprobs(base, sample) for sample in samples)
    model = adapted_model(model_dir, model_dir / START)
    _, gradients = plain_gradients(model, samples, reference, case.formula, case.aggregation, case.unit)
    right = {our_name(name): gradient for name, gradient in gradients.items()}
    joined = whole(found[1][trial], "first", "gradients")
    worst = worst_of(joined, right)
    assert worst[0] < TOLERANCE[trial.precision], worst


@every_trial
def test_engines_get_the_base_that_trainers_compute_with_and_the_adapters(
    trial: Trial, found: Any, models: Path
) -> None:
    model_dir = trial.model_dir(models)
    start = load_file(found[0] / trial.name / "step-1" / "adapter_model.safetensors")
    merged = whole(found[1][trial], "first", "merged")
    base, original = (
        base_weights(quantized_model(model_dir, trial.precision)),
        load_file(model_dir / "model.safetensors"),
    )
    num_quantized = 0
    for name, weight in merged.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        right = base[name].detach().float()
        if f"{key}.lora_A.weight" in start:
            num_quantized += 1
            a, b = (start[f"{key}.{factor}.weight"].float() for factor in ("lora_A", "lora_B"))
            right = right + SPEC.scale * b @ a
            assert (weight - original[name] - SPEC.scale * b @ a).abs().max() > 1e-3
        torch.testing.assert_close(weight, right, rtol=1e-6, atol=1e-6)
    assert num_quantized == 2 * 7


@every_trial
def test_a_step_from_the_checkpoint_has_the_same_bits(trial: Trial, found: Any) -> None:
    for rank in found[1][trial]:
        for kind in ("merged", "trained", "gradients"):
            second, again = rank["second"][kind], rank["resumed"][kind]
            assert second.keys() == again.keys()
            assert all(torch.equal(second[name], each) for name, each in again.items()), kind


@every_trial
def test_a_checkpoint_says_that_its_base_had_4_bits(trial: Trial, found: Any) -> None:
    directory = found[0] / trial.name / "step-1"
    assert load_state(directory)["load_in_4bit"] is True
    flags = ["--lora-rank", str(SPEC.rank), "--lora-alpha", str(SPEC.alpha)]
    check_saved_adapter(parse([*flags, "--load-in-4bit"])[0], directory)
    with pytest.raises(ConfigError, match=r"trained with the model in 4 bits; give --load-in-4bit, or start from it"):
        check_saved_adapter(parse(flags)[0], directory)


@pytest.mark.parametrize("trial", [each for each in FAST if each.layout == "dp1" and each.precision == "fp32"])
def test_the_reference_is_the_base_in_4_bits(trial: Trial, found: Any, models: Path) -> None:
    model_dir = trial.model_dir(models)
    samples = samples_near(model_dir / MERGED, 0)[:NUM_SCORED]
    model = whole_model(model_dir)
    with torch.no_grad():
        right = [sample_logprobs(model, sample) for sample in samples]
    for score, exact in zip(found[1][trial][0]["start scores"]["reference"], right, strict=True):
        torch.testing.assert_close(score[0], exact, rtol=0, atol=1e-5)
