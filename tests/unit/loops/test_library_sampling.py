"""Test which completions a library's trainer takes, how prompts of text begin, and weights of an earlier step."""

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import coati
from coati_rl.errors import ConfigError
from coati_rl.types import Score
from tests.unit.loops.test_library import GRPO, LIMITS, engine, reinforce, train

__all__ = ["engine"]  # a fixture

PROMPT = "one plus one"
REWARDS = [0.0, 1.0, 1.0, 0.0]


def samples_of(engine, **sampling):
    (group,) = engine.generate([PROMPT], n=4, **sampling)
    return coati.group_samples(group, REWARDS)


@pytest.mark.parametrize(
    "sampling",
    [{"top_p": 0.5}, *(pytest.param(each, marks=pytest.mark.full) for each in ({"top_k": 3}, {"min_p": 0.2}))],
)
def test_a_loss_does_not_divide_by_probabilities_among_fewer_tokens(engine, model_dir, sampling):
    samples = samples_of(engine, **sampling)
    with coati.Trainer(model_dir, "grpo", **GRPO) as trainer:
        with pytest.raises(ConfigError, match='use Trainer\\(old_logprobs="trainer"\\), or sample without them'):
            trainer.forward_backward(samples)
        assert len(trainer.score(samples)) == 4
    with coati.Trainer(model_dir, "grpo", **GRPO, old_logprobs="trainer") as trainer:
        assert trainer.forward_backward(samples)["ratio_max"] == 1.0
    with coati.Trainer(model_dir, reinforce, **LIMITS) as trainer:
        trainer.forward_backward(samples)
        assert trainer.optim_step(0.0)["grad_norm"] > 0, "a loss of one's own may not read them"


def test_completions_under_a_repetition_penalty_are_not_of_the_policy(engine, model_dir):
    samples = samples_of(engine, repetition_penalty=1.5)
    with (
        coati.Trainer(model_dir, "grpo", **GRPO, old_logprobs="trainer") as trainer,
        pytest.raises(ConfigError, match="repetition_penalty"),
    ):
        trainer.forward_backward(samples)


def score(reward, verdict):
    return Score(reward=reward, answer_correct=False, format_valid=True, verdict=verdict)


def test_what_could_not_be_scored_is_no_sample_and_no_part_of_the_mean(engine):
    (group,) = engine.generate([PROMPT], n=3)
    samples = coati.group_samples(group, [score(1.0, "ok"), score(0.0, "invalid"), score(0.0, "wrong")])
    assert [sample.number for sample in samples] == [0, 2]
    assert [sample.arrays["advantages"] for sample in samples] == coati.advantages([1.0, 0.0])


def test_a_text_has_one_beginning_whether_it_has_one_already_or_not(engine, model_dir, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    begin, number = tokenizer.convert_ids_to_tokens(5), 5
    tokenizer.bos_token = begin
    own = TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, number)])
    tokenizer.backend_tokenizer.post_processor = own
    monkeypatch.setattr(engine, "tokenizer", tokenizer)
    found = [engine.generate([text])[0][0].prompt_ids.tolist() for text in (PROMPT, begin + PROMPT)]
    assert found[0] == found[1] == tokenizer(PROMPT)["input_ids"]


def test_weights_of_an_earlier_step_are_pushed_as_the_engine_s_next_version(model_dir, engine, tmp_path):
    samples = samples_of(engine)
    with (
        coati.Engine(model_dir, backend="transformers", **LIMITS) as served,
        coati.Trainer(model_dir, "grpo", **GRPO) as trainer,
    ):
        train(trainer, samples)
        first = trainer.push_to(served)
        trainer.save(tmp_path / "step-1")
        train(trainer, samples, steps=2)
        trainer.push_to(served)
        trainer.load(tmp_path / "step-1")
        again = trainer.push_to(served)
        assert (first.policy_version, again.policy_version) == (1, 4)
        assert again.digest == first.digest
        (one,) = served.generate([PROMPT])[0]
        assert set(one.policy_versions.tolist()) == {4}
        np.testing.assert_allclose(trainer.score([one.sample(0.0)])[0], one.logprobs, atol=1e-4)


@pytest.mark.parametrize(("loss", "is_warned"), [("dapo", True), ("grpo", False)])
def test_what_an_algorithm_says_of_rollouts_is_warned_of(model_dir, caplog, loss, is_warned):
    coati.Trainer(model_dir, loss, **GRPO).close()
    assert ("filter_range, dynamic_batching: without effect here" in caplog.text) is is_warned
