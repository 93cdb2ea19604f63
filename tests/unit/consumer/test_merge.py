"""Test `coati-rl merge`: PEFT's merged weights, checked before they appear; what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from coati_rl.checkpoint.directory import write_state
from coati_rl.checkpoint.saved_adapter import recorded_weights
from coati_rl.errors import RunError
from coati_rl.model_files.identity import model_identity
from consumer.adapters import merged_files
from consumer.adapters.merge import merge_adapter
from consumer.merge_command import main
from tests.adapter_dirs import save_adapter
from tests.cases import one_of
from tests.unit.consumer.conftest import make_model


def load(directory: Path, auto: type = AutoModelForCausalLM, **settings: object) -> PreTrainedModel:
    return auto.from_pretrained(directory, dtype=torch.float32, **settings)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: each for path in sorted(directory.glob("model*.safetensors")) for name, each in load_file(path).items()
    }


def perturbed(directory: Path, target: Path, name: str) -> Path:
    """A copy of a model, one tensor of which is another."""
    shutil.copytree(directory, target)
    tensors = load_file(target / "model.safetensors")
    tensors[name][0] += 1
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def edit(directory: Path, **changes: object) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def adapter(model_dir: Path, written_adapter: Callable[..., Path], tmp_path: Path) -> Path:
    return shutil.copytree(written_adapter(model_dir), tmp_path / "adapter")


@pytest.fixture(scope="module")
def bf16_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, in bfloat16."""
    target = tmp_path_factory.mktemp("bf16")
    load(model_dir).bfloat16().save_pretrained(target)
    return target


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run the command; returns exit code and what it printed."""

    def run(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()  # of the fixtures
        code = main([str(each) for each in arguments])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


SETTINGS = (
    {},
    {"use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    {"lora_alpha": 3, "target_modules": ["layers.1.self_attn.v_proj"], "init_lora_weights": "orthogonal"},
    {"target_modules": ["k_proj"], "modules_to_save": ["norm", "layers.1.mlp"]},  # all of whose names end so
)


@pytest.mark.parametrize(("tied", "settings"), one_of(5, [True, False], SETTINGS))
def test_the_weights_are_those_of_peft_in_the_base_s_dtype_and_files_of_bounded_size(
    save_model: Callable[..., Path], tmp_path: Path, settings: dict[str, object], tied: bool
) -> None:
    base = save_model(tie_word_embeddings=tied)
    right = save_adapter(tmp_path / "adapter", load(base), **settings)
    merged = merge_adapter(base, tmp_path / "adapter", tmp_path / "out", where="ADAPTER", max_file_bytes=20_000)
    assert merged.num_files > 1 and merged.proof.largest < 1e-5 < merged.proof.mean_of_base
    read = load(tmp_path / "out").state_dict()
    for name, weight in right.state_dict().items():
        torch.testing.assert_close(read[name], weight, rtol=0, atol=1e-6)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(weights(base))
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in weights(base).values())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads((base / "config.json").read_text())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_an_adapter_of_the_head_is_merged_into_a_head_of_its_own(save_model, tmp_path, run, tied) -> None:
    """PEFT's merge changes the embedding with a tied head, so that its adapter is computed beside the base instead."""
    base, token_ids = save_model(tie_word_embeddings=tied), torch.tensor([[1, 2, 3, 9, 7, 7]])
    save_adapter(tmp_path / "adapter", load(base), target_modules=["q_proj", "down_proj", "lm_head"])
    with torch.no_grad():
        right = PeftModel.from_pretrained(load(base), tmp_path / "adapter").eval()(token_ids).logits
        code, printed = run(base, tmp_path / "adapter", tmp_path / "out")
        assert code == 0 and "5 with an adapter" in printed, printed
        read = load(tmp_path / "out").eval()
        torch.testing.assert_close(read(token_ids).logits, right, rtol=0, atol=1e-5)
    assert not read.config.tie_word_embeddings
    embedding = load(base).get_input_embeddings().weight
    assert torch.equal(read.get_input_embeddings().weight, embedding)
    assert "lm_head.weight" in weights(tmp_path / "out") and not torch.equal(read.lm_head.weight, embedding)
    other = perturbed(base, tmp_path / "other", "model.embed_tokens.weight" if tied else "lm_head.weight")
    code, printed = run(
        other, tmp_path / "adapter", tmp_path / "none"
    )  # PEFT writes the base's head beside its factors
    assert code == 2 and "holds another lm_head.weight than the base" in printed


def test_a_bfloat16_base_is_rounded_once(bf16_dir: Path, adapter: Path, tmp_path: Path) -> None:
    proof = merge_adapter(bf16_dir, adapter, tmp_path / "out", where="ADAPTER").proof
    assert proof.is_rounded and 0 < proof.mean < proof.mean_of_base
    factors, scale = load_file(adapter / "adapter_model.safetensors"), 2.0
    plain, merged = weights(bf16_dir), weights(tmp_path / "out")
    for name, weight in plain.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" in factors:
            product = factors[f"{layer}.lora_B.weight"].double() @ factors[f"{layer}.lora_A.weight"].double()
            exact = weight.double() + scale * product
            assert ((merged[name].double() - exact).abs() <= exact.abs() * 2**-8).all()
            assert merged[name].dtype is torch.bfloat16
        else:
            assert torch.equal(merged[name], weight)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_precision_chooses_the_dtype_of_all_weights(run, model_dir, bf16_dir, adapter, tmp_path, precision) -> None:
    base = model_dir if precision == "bf16" else bf16_dir
    code, printed = run(base, adapter, tmp_path / "out", "--precision", precision)
    assert code == 0, printed
    name = {"fp32": "float32", "bf16": "bfloat16"}[precision]
    assert {each.dtype for each in weights(tmp_path / "out").values()} == {getattr(torch, name)}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == name


def test_the_base_may_be_left_out_and_the_identity_is_printed(run, model_dir, adapter, tmp_path) -> None:
    code, printed = run(adapter, tmp_path / "out")
    assert code == 0 and "14 with an adapter" in printed
    assert f"weights {model_identity(tmp_path / 'out')[:16]}\n" in printed


def test_an_adapter_that_rounding_would_lose_is_refused(run, bf16_dir, written_adapter, tmp_path) -> None:
    adapter = written_adapter(bf16_dir, std=1e-5)
    code, printed = run(bf16_dir, adapter, tmp_path / "out")
    assert code == 2 and "it would be lost; use --precision fp32" in printed, printed
    assert not (tmp_path / "out").exists()
    assert run(bf16_dir, adapter, tmp_path / "out", "--precision", "fp32")[0] == 0


def test_an_adapter_of_zeros_is_said_to_change_nothing(run, model_dir, tmp_path) -> None:
    save_adapter(tmp_path / "adapter", load(model_dir), std=0)
    code, printed = run(model_dir, tmp_path / "adapter", tmp_path / "out")
    assert code == 0 and "the adapter changes nothing" in printed
    assert model_identity(tmp_path / "out") == model_identity(model_dir)


def test_a_classifier_has_the_trained_score_and_one_label(save_model, tmp_path, run) -> None:
    base = save_model(tie_word_embeddings=True, pad_token_id=7)
    plain = load(base, AutoModelForSequenceClassification, num_labels=1)
    right = save_adapter(tmp_path / "adapter", plain, task="SEQ_CLS").eval()
    code, printed = run(base, tmp_path / "adapter", tmp_path / "out")
    assert code == 0 and "128 values" in printed, printed
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"] and config["pad_token_id"] == 7
    read = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert read.config.num_labels == 1
    token_ids = torch.tensor([[1, 2, 3, 9, 7, 7]])
    torch.testing.assert_close(read(token_ids).logits, right(token_ids).logits, rtol=0, atol=1e-5)
    assert "lm_head.weight" not in weights(tmp_path / "out")


@pytest.mark.full
def test_the_tokenizer_is_the_adapter_s_if_it_has_one(model_dir, adapter, tmp_path) -> None:
    base = tmp_path / "base"
    shutil.copytree(model_dir, base)
    (base / "tokenizer.json").write_text("base")
    for name in ("merges.txt", "chat_template.json", "preprocessor_config.json"):
        (base / name).write_text("base")
    merge_adapter(base, adapter, tmp_path / "first", where="ADAPTER")
    (adapter / "chat_template.jinja").write_text("adapter")
    merge_adapter(base, adapter, tmp_path / "second", where="ADAPTER")
    (adapter / "tokenizer.json").write_text("adapter")
    merge_adapter(base, adapter, tmp_path / "third", where="ADAPTER")

    def texts(directory: Path) -> dict[str, str]:
        names = ("tokenizer.json", "merges.txt", "chat_template.jinja", "chat_template.json")
        assert (directory / "preprocessor_config.json").read_text() == "base"
        return {name: (directory / name).read_text() for name in names if (directory / name).exists()}

    of_base = {"tokenizer.json": "base", "merges.txt": "base"}
    assert texts(tmp_path / "first") == {**of_base, "chat_template.json": "base"}
    assert texts(tmp_path / "second") == {**of_base, "chat_template.jinja": "adapter"}
    assert texts(tmp_path / "third") == {"tokenizer.json": "adapter", "chat_template.jinja": "adapter"}


@pytest.mark.parametrize("what", one_of(3, ["scale", "base", "transposed"]))
def test_files_that_are_not_the_base_with_the_adapter_do_not_appear(
    run, monkeypatch, model_dir, adapter, tmp_path, what
) -> None:
    right = merged_files.with_product
    wrong = {
        "base": lambda weight, a, b, *, scale, dtype: weight.to(dtype),
        "scale": lambda weight, a, b, *, scale, dtype: right(weight, a, b, scale=scale * 1.01, dtype=dtype),
        "transposed": lambda weight, a, b, *, scale, dtype: right(weight, a.flip(0), b, scale=scale, dtype=dtype),
    }
    monkeypatch.setattr(merged_files, "with_product", wrong[what])
    code, printed = run(model_dir, adapter, tmp_path / "out")
    assert code == 1 and "the merged model is not the base with the adapter" in printed
    assert not (tmp_path / "out").exists() and not [*tmp_path.glob(".*")]


def test_an_export_of_the_base_is_found_however_little_the_adapter_does(monkeypatch, model_dir, tmp_path) -> None:
    save_adapter(tmp_path / "adapter", load(model_dir), std=1e-5)
    merge_adapter(model_dir, tmp_path / "adapter", tmp_path / "right", where="ADAPTER")
    monkeypatch.setattr(merged_files, "with_product", lambda weight, a, b, *, scale, dtype: weight.to(dtype))
    with pytest.raises(RunError, match=r"computes what the base .* does; nothing was written"):
        merge_adapter(model_dir, tmp_path / "adapter", tmp_path / "out", where="ADAPTER")


def test_another_base_than_the_recorded_one_is_refused(run, save_model, model_dir, adapter, tmp_path) -> None:
    write_state(adapter, {"weights": recorded_weights(adapter, model_identity(model_dir))})
    assert run(model_dir, adapter, tmp_path / "out")[0] == 0
    other = perturbed(model_dir, tmp_path / "other", "model.norm.weight")
    code, printed = run(other, adapter, tmp_path / "none")
    assert code == 2 and f"is an adapter of another base, whose weights are {model_identity(model_dir)}" in printed


@pytest.mark.full
def test_what_cannot_be_merged_is_refused_with_a_remedy(run, save_model, model_dir, adapter, tmp_path) -> None:
    out = tmp_path / "out"
    wider = save_model(hidden_size=64)
    deeper = save_model(num_hidden_layers=3)

    def refused(message: str, *arguments: object) -> None:
        code, printed = run(*arguments)
        assert code == 2 and message in printed, printed
        assert printed.count("\n") == 1 and not out.exists()

    refused("lora_A.weight has shape (4, 32), and (4, 64) is needed", wider, adapter, out)
    edit(adapter, target_modules="all-linear")
    refused("model.layers.2.self_attn.q_proj.lora_A.weight is missing", deeper, adapter, out)
    edit(adapter, target_modules=["q_proj", "wq"])
    refused("does not fit the base", model_dir, adapter, out)
    edit(adapter, target_modules=["q_proj", "embed_tokens"])
    refused("changes embed_tokens, which is not computed here", model_dir, adapter, out)
    edit(adapter, target_modules=["q_proj"], modules_to_save=["lm_head"])
    refused("changes lm_head, which is not computed here: head and embedding are one tensor", model_dir, adapter, out)
    neo = tmp_path / "neo"
    make_model("gpt_neo", num_layers=2, attention_types=[[["global"], 2]]).save_pretrained(neo)
    save_adapter(tmp_path / "of neo", load(neo), target_modules=["q_proj"], modules_to_save=["wte"])
    refused("changes wte, which is not computed here: head and embedding are one tensor", neo, tmp_path / "of neo", out)
    edit(adapter, modules_to_save=None)
    edit(adapter, target_modules="all-linear", use_dora=True)
    refused("has use_dora True, which is not computed here", model_dir, adapter, out)
    edit(adapter, use_dora=False, base_model_name_or_path=None)
    refused("does not say what its base is", adapter, out)
    refused("holds a whole model, so that there is nothing to merge", model_dir, model_dir, out)
    refused("no such directory", model_dir, tmp_path / "none", out)
    refused("holds no model, adapter or complete checkpoint", model_dir, tmp_path, out)
    refused("holds an adapter", adapter, adapter, out)
    code, printed = run(model_dir, adapter, tmp_path)
    assert code == 2 and "exists; name a directory that does not" in printed


@pytest.mark.full
def test_a_run_stands_for_its_newest_checkpoint(run, model_dir, adapter, tmp_path) -> None:
    from coati_rl.checkpoint.directory import write_manifest

    for step in (1, 2):
        checkpoint = tmp_path / "run" / "checkpoints" / f"step-{step}"
        save_adapter(checkpoint, load(model_dir), seed=step)
        write_state(checkpoint, {})
        write_manifest(checkpoint)
    assert run(tmp_path / "run", tmp_path / "out")[0] == 0
    assert run(model_dir, tmp_path / "run" / "checkpoints" / "step-2", tmp_path / "second")[0] == 0
    assert model_identity(tmp_path / "out") == model_identity(tmp_path / "second")


def test_the_command_has_two_or_three_paths(run) -> None:
    with pytest.raises(SystemExit) as exit_:
        run("one")
    assert exit_.value.code == 2
