"""Test adapters in one process: how they begin, what they compute, and which are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.checkpoint.saved_adapter import check_saved_adapter
from coati_rl.config.cli import build_job
from coati_rl.config.commands import OFFLINE
from coati_rl.errors import ConfigError
from coati_rl.model_files.adapter_files import CONFIG_FILE, PREFIX, WEIGHTS_FILE, AdapterSpec
from coati_rl.preflight.adapter import with_adapter
from coati_rl.preflight.resources import resolve_model
from consumer.adapters.adapters import AdapterSource, adapter_infos
from consumer.adapters.check import check_adapters
from consumer.backend import Backend
from consumer.parallel.layout import Layout
from consumer.parallel.parameters import describe_parameters
from consumer.parallel.single_process import SingleProcess
from tests.backends import backend_config
from tests.cases import one_of
from tests.unit.consumer.conftest import make_micro_batch
from tests.unit.consumer.test_backend import mini_batch

SPEC = AdapterSpec(rank=4, alpha=12.0, targets=("all-linear",))
SAMPLES = ([1, 2, 3, 4, 5, 6], 2), ([7, 8, 9, 10], 1)
MICRO_BATCH = make_micro_batch(*SAMPLES)
SAMPLED = [2, 3, 4, 5, 7, 8, 9]  # places of sampled tokens in its row


def make_backend(
    model_dir: Path,
    start: Path | None = None,
    *,
    spec: AdapterSpec = SPEC,
    takes_lm_head: bool = False,
    **settings: Any,
) -> Backend:
    source = AdapterSource(spec=spec, base=str(model_dir), directory=start, seed=3, takes_lm_head=takes_lm_head)
    config = backend_config(model_dir, adapters=source, **settings)
    return Backend(config, SingleProcess(device=torch.device("cpu")))


def step(backend: Backend, number: int = 0) -> dict[str, torch.Tensor]:
    """Returns: the gradients."""
    backend.forward_backward(mini_batch(MICRO_BATCH, step=number), PolicyLoss())
    backend.reduce_gradients()
    gradients = {name: gradient.clone() for name, gradient in backend.policy.gradients.items()}
    backend.optimizer_step(loss_scale=1.0, learning_rate=1e-2)
    return gradients


@pytest.fixture
def adapter_of(written_adapter: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """(model directory, settings) -> a copy of an adapter that PEFT has written, which the test may change."""

    def copy(model_dir: Path, **settings: Any) -> Path:
        written = written_adapter(model_dir, **{"lora_alpha": 12, "std": 0.1, **settings})
        return shutil.copytree(written, tmp_path / "adapter")

    return copy


def test_new_adapters_change_nothing_and_follow_the_seed_and_their_names(model_dir: Path) -> None:
    backend, again = make_backend(model_dir), make_backend(model_dir)
    trained = backend.policy.parameters.trained
    assert torch.equal(backend.score([MICRO_BATCH])[0], backend.score([MICRO_BATCH], "reference")[0])
    assert all(torch.equal(each, again.policy.parameters.trained[name]) for name, each in trained.items())
    drawn = {name: each for name, each in trained.items() if "lora_A" in name}
    assert len({float(each.detach().flatten()[0]) for each in drawn.values()}) == len(drawn)
    for each in drawn.values():
        assert each.abs().max() <= each.shape[1] ** -0.5 < 1.2 * each.abs().max()  # as PEFT draws them
    assert not any(each.any() for name, each in trained.items() if "lora_B" in name)
    assert not any(p.requires_grad for name, p in backend.policy.module.named_parameters() if "lora_" not in name)


def test_a_step_moves_adapters_alone_and_the_reference_stays(model_dir: Path) -> None:
    backend = make_backend(model_dir)
    before = {name: each.clone() for name, each in backend.policy.parameters.local.items()}
    reference = backend.score([MICRO_BATCH], "reference")[0]
    step(backend)
    moved = {name for name, each in backend.policy.parameters.local.items() if not torch.equal(each, before[name])}
    assert moved and all("lora_" in name for name in moved)
    assert torch.equal(backend.score([MICRO_BATCH], "reference")[0], reference)
    assert not torch.equal(backend.score([MICRO_BATCH])[0], reference)


@pytest.mark.parametrize(
    "settings", one_of(2, [{}, {"target_modules": ["q_proj"]}, {"use_rslora": True}, {"lora_alpha": 3}])
)
def test_the_export_is_peft_s_merged_model(
    model_dir: Path, adapter_of: Callable[..., Path], settings: dict[str, Any]
) -> None:
    start = adapter_of(model_dir, **settings)
    config = with_adapter(build_job({"model": str(model_dir), "dataset": "d", "adapter": str(start)}, OFFLINE["sft"]))
    backend = make_backend(model_dir, start, spec=config.lora.spec)
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    merged = peft.PeftModel.from_pretrained(base, start).merge_and_unload().state_dict()
    exported = dict(backend.export_weights())
    assert exported.keys() <= merged.keys()
    for name, weight in exported.items():
        torch.testing.assert_close(weight, merged[name], rtol=1e-6, atol=1e-6)
    assert [entry.name for entry in backend.weight_entries()] == [*exported]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_of_the_lm_head_computes_and_learns_as_peft_s(
    save_model: Callable[..., Path], adapter_of: Callable[..., Path], tied: bool, tmp_path: Path
) -> None:
    model_dir = save_model(tie_word_embeddings=tied)
    start = adapter_of(model_dir, target_modules=["q_proj", "lm_head"])
    config = with_adapter(job(model_dir, adapter=str(start), num_trainers=1))
    check_adapters(config, AutoConfig.from_pretrained(model_dir))
    backend = make_backend(model_dir, start, spec=config.lora.spec, takes_lm_head=True)
    plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), start, is_trainable=True)
    expected = torch.cat([sampled_logprobs(plain, *each) for each in SAMPLES])
    found = backend.score([MICRO_BATCH])[0].flatten()[SAMPLED]
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-5)
    (-(expected + 4).exp().clamp(max=1.2).sum()).backward()  # of an advantage of 1 against e^-4, clipped
    for name, gradient in step(backend).items():
        right = plain.get_parameter(PREFIX + name.removesuffix(".weight") + ".default.weight").grad
        torch.testing.assert_close(gradient, right, rtol=1e-5, atol=1e-6)
    assert not torch.equal(backend.score([MICRO_BATCH], "reference")[0].flatten()[SAMPLED], found)
    backend.save(tmp_path / "step-1", state={"step": 1})
    again = make_backend(model_dir, tmp_path / "step-1", spec=config.lora.spec, takes_lm_head=True)
    assert torch.equal(again.score([MICRO_BATCH])[0], backend.score([MICRO_BATCH])[0])
    sent = dict(backend.export_weights())["lm_head.weight"]
    torch.testing.assert_close(sent, again.policy.module.get_output_embeddings().adapted_weight(), rtol=0, atol=1e-7)


def sampled_logprobs(model: Any, ids: list[int], prompt: int) -> torch.Tensor:
    logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return logprobs[prompt - 1 : -1].gather(-1, torch.tensor(ids[prompt:])[:, None])[:, 0]


def test_what_shares_the_base_leaves_the_adapters_as_they_were(
    model_dir: Path, adapter_of: Callable[..., Path]
) -> None:
    backend = make_backend(model_dir, adapter_of(model_dir))
    backend.keep_old_policy()
    old = backend.score([MICRO_BATCH])[0]
    step(backend)
    trained = {name: each.clone() for name, each in backend.policy.parameters.trained.items()}
    assert torch.equal(backend.score([MICRO_BATCH], "old")[0], old)
    with pytest.raises(AttributeError):
        backend.score([None], "old")  # type: ignore[list-item]
    backend._views["old"]._model.score = None  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError):
        backend._views["old"].score([])
    assert all(torch.equal(each, trained[name]) for name, each in backend.policy.parameters.trained.items())


def test_dropout_is_of_training_alone_and_follows_step_and_seed(
    model_dir: Path, adapter_of: Callable[..., Path]
) -> None:
    start, spec = adapter_of(model_dir), AdapterSpec(rank=4, alpha=12.0, targets=("all-linear",), dropout=0.5)
    plain, dropping, again = make_backend(model_dir, start), *(make_backend(model_dir, start, spec=spec),) * 2
    state = torch.get_rng_state()
    assert torch.equal(plain.score([MICRO_BATCH])[0], dropping.score([MICRO_BATCH])[0])
    expected, found = step(plain), step(dropping)
    assert all(not torch.equal(gradient, expected[name]) for name, gradient in found.items())
    again = make_backend(model_dir, start, spec=spec)
    assert all(torch.equal(gradient, found[name]) for name, gradient in step(again).items())
    other = make_backend(model_dir, start, spec=spec)
    assert any(not torch.equal(gradient, found[name]) for name, gradient in step(other, number=1).items())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_resumed_run_has_the_adapter_once(model_dir: Path, adapter_of: Callable[..., Path], tmp_path: Path) -> None:
    backend, saved = make_backend(model_dir, adapter_of(model_dir)), tmp_path / "step-1"
    step(backend)
    backend.save(saved, state={"step": 1})
    resumed = make_backend(model_dir, saved)
    resumed.restore(saved)
    assert torch.equal(resumed.score([MICRO_BATCH])[0], backend.score([MICRO_BATCH])[0])
    pairs = zip(backend.export_weights(), resumed.export_weights(), strict=True)
    assert all(torch.equal(left, right) for (_, left), (_, right) in pairs)
    assert torch.equal(resumed.score([MICRO_BATCH], "reference")[0], backend.score([MICRO_BATCH], "reference")[0])
    assert not (saved / "model.safetensors").exists() and not (saved / "config.json").exists()


def job(model_dir: Path, name: str = "sft", **settings: Any) -> Any:
    return build_job({"model": str(model_dir), "dataset": "d", **settings}, OFFLINE[name])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_rank": 4, "lora_targets": "q_proj,w_proj"}, r"--lora-targets w_proj: no linear layer"),
        ({"lora_rank": 4, "lora_targets": "lm_head"}, r"lm_head: no linear layer .* takes an adapter; it has q_proj"),
    ],
)
def test_a_layer_that_takes_no_adapter_is_refused(model_dir: Path, settings: dict[str, Any], message: str) -> None:
    config = job(model_dir, **settings)
    with pytest.raises(ConfigError, match=message):
        check_adapters(config, AutoConfig.from_pretrained(model_dir))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.popitem(), "is missing"),
        (lambda tensors: tensors.update({PREFIX + "x.lora_A.weight": torch.ones(4, 2)}), "x.lora_A.weight is unknown"),
        (lambda tensors: tensors.update({key: value[:2] for key, value in tensors.items()}), "has shape"),
    ],
)
def test_an_adapter_of_another_model_is_refused(
    model_dir: Path, adapter_of: Callable[..., Path], change: Callable[[Any], None], message: str
) -> None:
    start = adapter_of(model_dir)
    tensors = load_file(start / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, start / WEIGHTS_FILE)
    config = with_adapter(job(model_dir, adapter=str(start)))
    with pytest.raises(ConfigError, match=rf"--adapter .*: does not fit the model.*{message}"):
        check_adapters(config, AutoConfig.from_pretrained(model_dir))


def test_values_that_are_not_finite_are_refused(model_dir: Path, adapter_of: Callable[..., Path]) -> None:
    start = adapter_of(model_dir)
    tensors = load_file(start / WEIGHTS_FILE)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, start / WEIGHTS_FILE)
    with pytest.raises(ConfigError, match="has values that are not finite"):
        make_backend(model_dir, start)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"use_dora": True}, "has use_dora True, which is not computed here"),
        ({"rank_pattern": {"gate": 8}, "target_parameters": ["down_proj"]}, "has rank_pattern .*target_parameters"),
        ({"bias": "all", "init_lora_weights": "pissa"}, "has bias 'all', init_lora_weights 'pissa', which is not"),
        ({"target_modules": ".*proj"}, "is a pattern"),
        ({"r": None}, "is no LoRA adapter that can be read"),
    ],
)
def test_what_peft_computes_in_another_way_is_refused(
    model_dir: Path, adapter_of: Callable[..., Path], values: dict[str, Any], message: str
) -> None:
    path = adapter_of(model_dir) / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(ConfigError, match=message):
        with_adapter(job(model_dir, adapter=str(path.parent)))


def test_flags_that_say_something_else_than_the_adapter_are_refused(
    model_dir: Path, adapter_of: Callable[..., Path], tmp_path: Path
) -> None:
    start = adapter_of(model_dir)
    assert with_adapter(job(model_dir, adapter=str(start), lora_rank=4)).lora.spec.scale == 3.0
    with pytest.raises(ConfigError, match=r"--lora-rank 8, and it has 4; leave the flag out"):
        with_adapter(job(model_dir, adapter=str(start), lora_rank=8))
    with pytest.raises(ConfigError, match=r"--lora-alpha 8.0, and it has 12.0"):
        with_adapter(job(model_dir, adapter=str(start), lora_alpha=8))
    with pytest.raises(ConfigError, match=r"--model .*: holds an adapter and not a model"):
        resolve_model(str(start), is_dry_run=False)
    with pytest.raises(ConfigError, match="is no LoRA adapter that can be read"):
        with_adapter(job(model_dir, adapter=str(tmp_path)))
    with pytest.raises(ConfigError, match="a new scalar head has no adapter"):
        check_adapters(with_adapter(job(model_dir, "rm", adapter=str(start))), AutoConfig.from_pretrained(model_dir))


def test_a_checkpoint_of_other_adapters_is_refused(model_dir: Path, tmp_path: Path) -> None:
    saved = tmp_path / "step-1"
    make_backend(model_dir).save(saved, state={"step": 1})
    check_saved_adapter(job(model_dir, lora_rank=4, lora_alpha=12), saved)
    for settings, message in (
        ({"lora_rank": 8, "lora_alpha": 24}, "lora_rank 4 instead of 8, lora_alpha 12.0 instead of 24.0"),
        ({"lora_rank": 4}, "lora_alpha 12.0 instead of 8.0"),
        ({"lora_rank": 4, "lora_alpha": 12, "use_rslora": True}, "use_rslora False instead of True"),
        ({"lora_rank": 4, "lora_alpha": 12, "lora_targets": "q_proj"}, "lora_targets .* instead of q_proj"),
        ({}, "holds an adapter; give that run's --lora-rank"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_saved_adapter(job(model_dir, **settings), saved)
    with pytest.raises(ConfigError, match="holds the whole model; leave --lora-rank out"):
        check_saved_adapter(job(model_dir, lora_rank=4), model_dir)


def test_factors_are_cut_as_the_layer_beside_them(model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    infos = describe_parameters(model, Layout(tp_size=2), [2])
    cut = {info.name.split(".", 3)[3]: (info.split_dim, info.is_partial) for info in adapter_infos(model, infos, SPEC)}
    assert cut["self_attn.q_proj.lora_A.weight"] == (None, False)
    assert cut["self_attn.q_proj.lora_B.weight"] == (0, False)
    assert cut["mlp.down_proj.lora_A.weight"] == (1, False)
    assert cut["mlp.down_proj.lora_B.weight"] == (None, False)
