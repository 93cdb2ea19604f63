"""Test which models a critic can begin with, and that what it lacks is named before anything starts."""

import json

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from coati_rl.errors import ConfigError
from tests.unit.preflight.test_teacher import prepare_with, teacher_with  # noqa: F401  (fixtures)

OF_TOKENS, OF_SEQUENCES = AutoModelForTokenClassification, "Qwen3ForSequenceClassification"


@pytest.fixture
def classifier(make_model_dir, tmp_path):
    """A directory of a classifier of sequences or of tokens, with the tokenizer of the tests' models."""

    def make(auto_class=AutoModelForSequenceClassification, labels=1):
        source, directory = make_model_dir(1), tmp_path / "critic"
        model = auto_class.from_pretrained(source, num_labels=labels)
        model.config.pad_token_id = 0
        model.save_pretrained(directory)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (directory / name).write_bytes((source / name).read_bytes())
        return directory

    return make


def change(directory, *, without=(), **settings):
    """Take tensors out of a model's files, and set fields of its config.json."""
    weights = load_file(directory / "model.safetensors")
    save_file({name: weights[name] for name in weights if name not in without}, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **settings}))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["language model", "of sequences", "of tokens", "of tokens by its names"])
def test_a_language_model_and_a_classifier_are_taken_as_directories(prepare_with, teacher_with, classifier, kind):  # noqa: F811
    if kind == "language model":
        directory = teacher_with()
    else:
        directory = classifier(AutoModelForSequenceClassification if kind == "of sequences" else OF_TOKENS)
    if kind == "of tokens by its names":
        change(directory, architectures=["Qwen3ForCausalLM"])
    prepared = prepare_with(f"-a PPO --critic-model {directory}")
    assert prepared.config.critic.critic_model == str(directory)
    assert f"critic from {directory}" in str(prepared.plan.lines())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        ({"labels": 3}, "classifier with 3 labels"),
        ({"auto_class": OF_TOKENS, "labels": 3}, "classifier with 3 labels"),
        (
            {"auto_class": OF_TOKENS, "without": ["score.bias"]},
            "Qwen3ForTokenClassification differ: the files lack score.bias",
        ),
        ({"auto_class": OF_TOKENS, "without": ["score.weight"]}, "and its files lack score.weight"),
        (
            {"auto_class": OF_TOKENS, "architectures": [OF_SEQUENCES]},
            f"{OF_SEQUENCES} has no score.bias, which would be",
        ),
        ({"without": ["score.weight"]}, f"{OF_SEQUENCES} differ: the files lack score.weight"),
    ],
)
def test_another_head_is_refused_by_name(prepare_with, classifier, make, message):  # noqa: F811
    directory = classifier(**{name: make[name] for name in ("auto_class", "labels") if name in make})
    change(directory, **{name: value for name, value in make.items() if name not in ("auto_class", "labels")})
    with pytest.raises(ConfigError) as caught:
        prepare_with(f"-a PPO --critic-model {directory}")
    assert str(caught.value).startswith(f"--critic-model {directory}") and message in str(caught.value)


def test_another_vocabulary_is_refused(prepare_with, teacher_with):  # noqa: F811
    directory = teacher_with(tokens={"A": "AA", "B": "BB"})
    with pytest.raises(ConfigError, match=f"--critic-model {directory}: its vocabulary of 257 tokens is not that of"):
        prepare_with(f"-a PPO --critic-model {directory}")


def test_a_critic_that_is_not_here_is_an_error_and_in_a_dry_run_a_warning(prepare_with):  # noqa: F811
    with pytest.raises(ConfigError, match="--critic-model /nowhere"):
        prepare_with("-a PPO --critic-model /nowhere")
