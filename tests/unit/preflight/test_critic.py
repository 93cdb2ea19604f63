"""Test which models a critic can begin with, and that what it lacks is named before anything starts."""

import pytest
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from coati_rl.errors import ConfigError
from tests.unit.preflight.test_teacher import prepare_with, teacher_with  # noqa: F401  (fixtures)


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


def test_a_language_model_and_a_reward_model_are_taken_as_directories(prepare_with, teacher_with, classifier):  # noqa: F811
    for directory in (teacher_with(), classifier()):
        prepared = prepare_with(f"-a PPO --critic-model {directory}")
        assert prepared.config.critic.critic_model == str(directory)
        assert f"critic from {directory}" in prepared.plan.algorithm


@pytest.mark.parametrize(
    ("make", "message"),
    [
        ({"labels": 3}, "classifier with 3 labels"),
        ({"auto_class": AutoModelForTokenClassification}, "score.bias"),
    ],
)
def test_another_head_is_refused_by_name(prepare_with, classifier, make, message):  # noqa: F811
    directory = classifier(**make)
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
