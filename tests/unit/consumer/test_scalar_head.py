"""Test models with a scalar head: how they are loaded, that their values are transformers', and their checkpoints."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

from coati_rl.batch import MicroBatch, MiniBatch
from coati_rl.batching.packing import pack
from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.errors import ConfigError
from coati_rl.reading.reward_samples import reward_pair
from coati_rl.samples import Sample
from consumer.backend import Backend
from consumer.models.policy_model import make_input, policy_forward
from consumer.models.scalar_head import ScalarHead, load_scalar
from consumer.objectives.pairwise import Pairwise
from consumer.optim.learning_rate import LearningRate
from consumer.optim.weight_decay import names_without_decay
from consumer.parallel.single_process import SingleProcess
from consumer.train_step import TrainStep
from tests.backends import backend_config

PAD = 0
CPU = torch.device("cpu")


def load(model_dir: Path, **settings: int) -> torch.nn.Module:
    return load_scalar(model_dir, ScalarHead(**{"pad_token_id": PAD, **settings}), dtype=torch.float32)


def make_pairs(count: int = 3) -> list[Sample]:
    rng = np.random.default_rng(0)
    samples: list[Sample] = []
    for number in range(count):
        ids = (rng.integers(1, 50, int(rng.integers(2, 9))) for _ in range(3))
        samples += reward_pair(str(number), *ids, pad_token_id=PAD)
    return samples


def sequence(sample: Sample) -> torch.Tensor:
    return torch.tensor(np.concatenate([sample.prefix_ids, sample.token_ids]))


def make_backend(model_dir: Path, **settings: float) -> Backend:
    optimizer = OptimizerConfig(**settings)
    config = backend_config(model_dir, scalar_head=ScalarHead(pad_token_id=PAD), optimizer=optimizer)
    return Backend(config, SingleProcess(device=CPU))


def train(backend: Backend, *steps: int) -> None:
    train_step = TrainStep(backend, Pairwise(), learning_rate=LearningRate(peak=1e-3))
    for step in steps:
        micro_batches = pack(make_pairs(), max_samples=4, unit=2)[0]
        mini_batch = MiniBatch(
            step=step, micro_batches=micro_batches, is_last=True, loss_scale=1 / 3, learning_rate_progress=0.0
        )
        train_step.run(mini_batch)


def test_a_new_head_is_drawn_by_its_seed_alone_with_variance_one_over_size_plus_one(model_dir: Path) -> None:
    torch.manual_seed(1)
    first = load(model_dir, seed=5)
    torch.manual_seed(2)
    assert torch.equal(load(model_dir, seed=5).score.weight, first.score.weight)
    assert not torch.equal(load(model_dir, seed=6).score.weight, first.score.weight)
    assert first.score.weight.shape == (1, 32)
    assert first.score.weight.std().item() == pytest.approx(33**-0.5, rel=0.3)
    assert first.model.embed_tokens.weight.requires_grad
    assert not first.training


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_values_in_packed_rows_are_transformers_scores_of_each_sequence_alone(
    save_model: Callable[..., Path], tmp_path: Path, model_type: str, tied: bool
) -> None:
    model = load(save_model(model_type, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation="eager")
    samples = make_pairs()
    expected = [plain(input_ids=sequence(sample)[None]).logits.item() for sample in samples]
    for per_row in (False, True):
        (micro_batch,) = pack(samples, max_samples=6, unit=2, one_sample_per_row=per_row)[0]
        values, sums = policy_forward(model, make_input(micro_batch, device=CPU))
        assert values.flatten().tolist() == pytest.approx(expected, abs=1e-5)
        assert values.dtype == torch.float32
        assert sums == {}


def test_values_of_every_token_of_a_sample_are_those_of_the_layer_on_its_hidden_states(model_dir: Path) -> None:
    """As a critic needs them."""
    model = load(model_dir)
    ids = np.arange(1, 8)
    sample = Sample(
        uid="x",
        number=0,
        prefix_ids=ids[:2],
        token_ids=ids[2:],
        loss_mask=np.ones(5, bool),
        arrays={"temperature": 1.0},
    )
    (micro_batch,) = pack([sample], max_samples=1)[0]
    values, _ = policy_forward(model, make_input(micro_batch, device=CPU))
    hidden = model.model(input_ids=torch.tensor(ids)[None]).last_hidden_state
    torch.testing.assert_close(values, model.score(hidden)[:, 1:-1, 0])


def test_values_where_the_mask_is_false_are_zero_and_get_no_gradient(model_dir: Path) -> None:
    model = load(model_dir)
    (micro_batch,) = pack(make_pairs(1), max_samples=2, unit=2, one_sample_per_row=True)[0]
    mask = micro_batch.loss_arrays["loss_mask"].copy()
    mask[1] = False
    masked: MicroBatch = micro_batch.with_arrays(loss_mask=mask)
    values, _ = policy_forward(model, make_input(masked, device=CPU))
    assert values[1].item() == 0.0
    values[1].sum().backward()
    assert model.score.weight.grad.abs().max() == 0


def test_a_checkpoint_loads_as_a_classifier_of_one_label_and_resumes_to_the_same_weights(
    model_dir: Path, tmp_path: Path
) -> None:
    whole = make_backend(model_dir)
    train(whole, 0, 1)
    whole.save(tmp_path / "step-2", state={"step": 2})
    scores = whole.score(pack(make_pairs(), max_samples=6, unit=2)[0])[0].flatten()
    train(whole, 2)

    config = AutoConfig.from_pretrained(tmp_path / "step-2")
    assert (config.architectures, config.num_labels, config.pad_token_id) == (
        ["Qwen3ForSequenceClassification"],
        1,
        PAD,
    )
    saved, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "step-2", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    padded = torch.nn.utils.rnn.pad_sequence([sequence(s) for s in make_pairs()], batch_first=True, padding_value=PAD)
    torch.testing.assert_close(saved(input_ids=padded).logits.flatten(), scores, atol=1e-5, rtol=0)

    resumed = make_backend(tmp_path / "step-2")
    resumed.restore(tmp_path / "step-2")
    train(resumed, 2)
    for name, weight in whole.policy.parameters.local.items():
        assert torch.equal(weight, resumed.policy.parameters.local[name]), name


@pytest.fixture(scope="module")
def of_tokens(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of tokens with one label, whose bias is 0.25."""
    directory = tmp_path_factory.mktemp("tokens")
    model = AutoModelForTokenClassification.from_pretrained(model_dir, num_labels=1)
    torch.nn.init.constant_(model.score.bias, 0.25)
    model.save_pretrained(directory)
    return directory


def test_values_of_a_classifier_of_tokens_have_its_bias(of_tokens: Path) -> None:
    plain = AutoModelForTokenClassification.from_pretrained(of_tokens, attn_implementation="eager").eval()
    model, samples = load(of_tokens), make_pairs()
    assert type(model).__name__ == "Qwen3ForTokenClassification"
    assert "score.bias" in names_without_decay(model) and "score.weight" not in names_without_decay(model)
    expected = [plain(input_ids=sequence(each)[None]).logits[0, -2, 0].item() for each in samples]
    (micro_batch,) = pack(samples, max_samples=6, unit=2)[0]
    values, _ = policy_forward(model, make_input(micro_batch, device=CPU))
    assert values.flatten().tolist() == pytest.approx(expected, abs=1e-5)
    torch.nn.init.zeros_(model.score.bias)
    without, _ = policy_forward(model, make_input(micro_batch, device=CPU))
    torch.testing.assert_close(values - without, torch.full_like(values, 0.25))


def test_a_classifier_of_tokens_is_saved_as_one_and_resumes_to_the_same_bits(of_tokens: Path, tmp_path: Path) -> None:
    whole = make_backend(of_tokens, weight_decay=0.5)
    train(whole, 0, 1)
    whole.save(tmp_path / "step-2", state={"step": 2})
    (micro_batch,) = pack(make_pairs(), max_samples=6, unit=2)[0]
    values = whole.score([micro_batch])[0].flatten()
    train(whole, 2)

    saved, report = AutoModelForTokenClassification.from_pretrained(tmp_path / "step-2", output_loading_info=True)
    assert saved.config.architectures == ["Qwen3ForTokenClassification"] and saved.config.num_labels == 1
    assert not report["missing_keys"] and not report["unexpected_keys"]
    expected = [saved.eval()(input_ids=sequence(each)[None]).logits[0, -2, 0] for each in make_pairs()]
    torch.testing.assert_close(torch.stack(expected), values, atol=1e-5, rtol=0)

    resumed = make_backend(tmp_path / "step-2", weight_decay=0.5)
    resumed.restore(tmp_path / "step-2")
    train(resumed, 2)
    assert resumed.policy.parameters.local.keys() == whole.policy.parameters.local.keys() >= {"score.bias"}
    for name, weight in whole.policy.parameters.local.items():
        assert torch.equal(weight, resumed.policy.parameters.local[name]), name


@pytest.mark.parametrize("lacking", ["score.bias", "score.weight"])
def test_a_classifier_of_tokens_without_a_part_of_its_head_is_refused_by_its_name(
    of_tokens: Path, tmp_path: Path, lacking: str
) -> None:
    weights = load_file(of_tokens / "model.safetensors")
    del weights[lacking]
    shutil.copy(of_tokens / "config.json", tmp_path)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=f"Qwen3ForTokenClassification differ: the files lack {lacking}, which"):
        load(tmp_path)


def test_without_a_given_padding_token_the_models_own_is_kept_or_its_end_of_sequence_taken(
    save_model: Callable[..., Path], model_dir: Path
) -> None:
    assert load(save_model(pad_token_id=4, eos_token_id=5), pad_token_id=None).config.pad_token_id == 4
    assert load(save_model(pad_token_id=None, eos_token_id=[5, 6]), pad_token_id=None).config.pad_token_id == 5
    with pytest.raises(ConfigError, match="set pad_token_id"):
        load(save_model(pad_token_id=None, eos_token_id=None), pad_token_id=None)


def test_a_classifier_of_several_labels_and_an_unreadable_directory_are_refused(
    model_dir: Path, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(model_dir, num_labels=3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="classifier with 3 labels"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load(tmp_path / "none")
