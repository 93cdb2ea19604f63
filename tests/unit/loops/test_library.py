"""Test that a loop of one's own takes the steps of a run."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import coati
from coati_rl.errors import ConfigError, EngineError, RunError
from coati_rl.probe import ProbeAnswer
from coati_rl.work import TrainWork
from producer.engine_client import Completion

STEPS = {"num_episodes": 2, "max_steps": 5}


@pytest.fixture(scope="module")
def run(run_in_threads):
    return run_in_threads({**STEPS, "algo": "GRPO"}, hold_trainer=True)


def completions_of(group):
    prompt_ids = np.array(group.prompt.token_ids, dtype=np.int32)
    return [
        Completion(
            prompt_ids=prompt_ids,
            uid=group.prompt.uid,
            number=number,
            temperature=group.temperature,
            token_ids=one.token_ids[one.loss_mask],
            logprobs=one.logprobs,
            policy_versions=one.policy_versions,
            finish_reason="stop",
            text=one.text,
        )
        for number, one in enumerate(group.trajectories)
    ]


def groups_of(trace, work):
    """The groups that a mini-batch trains, by uid, as a run sorts them."""
    trained = {tuple(ids) for ids in work.batch.samples.split().token_ids}
    found = [g for g in trace.groups if {tuple(t.token_ids[t.loss_mask]) for t in g.trajectories} <= trained]
    return sorted(found, key=lambda group: group.prompt.uid)


def test_five_steps_have_the_weights_of_a_run_bit_for_bit(run, small_run):
    names = ("max_prompt_tokens", "max_new_tokens", "train_microbatch_size")
    flags = {name: small_run[name] for name in names}
    rates = [step["learning_rate"] for step in run.steps]
    with coati.Trainer(small_run["model"], "grpo", **flags) as trainer:
        works = [work for work in run.work if isinstance(work, TrainWork)]
        assert len(works) == 5
        for work, rate, step in zip(works, rates, run.steps, strict=True):
            samples = []
            for group in groups_of(run, work):
                samples += coati.group_samples(completions_of(group), [score.reward for score in group.scores])
            trainer.forward_backward(samples)
            metrics = trainer.optim_step(rate)
            assert metrics["loss"] == step["loss"]
            assert metrics["grad_norm"] == step["grad_norm"]
        weights = weights_of(trainer)
    assert weights.keys() == run.weights.keys()
    assert all(torch.equal(weight, run.weights[name]) for name, weight in weights.items())


LIMITS = {"max_prompt_tokens": 32, "max_new_tokens": 8}
GRPO = {**LIMITS, "kl_coeff": 0.0, "train_microbatch_size": 8}


@pytest.fixture(scope="module")
def engine(model_dir):
    with coati.Engine(model_dir, backend="transformers", seed=3, **LIMITS) as engine:
        yield engine


@pytest.fixture(scope="module")
def samples(engine):
    """Of two prompts with four completions each, whose rewards differ."""
    groups = engine.generate(["one plus one", [{"role": "user", "content": "hello"}]], n=4)
    return [sample for group in groups for sample in coati.group_samples(group, [0.0, 1.0, 1.0, 0.0])]


def weights_of(trainer):
    return {name: weight.clone() for name, weight in trainer.members._member._backend.export_weights()}


def train(trainer, samples, *, steps=1, lr=1e-2):
    for _ in range(steps):
        trainer.forward_backward(samples)
        trainer.optim_step(lr)
    return weights_of(trainer)


def test_prompts_are_text_conversations_and_token_ids_and_the_seed_decides(engine):
    texts = ["one plus one", [{"role": "user", "content": "hello"}]]
    first, again = (engine.generate(texts, n=3, seed=7) for _ in range(2))
    (of_ids,) = engine.generate([first[0][0].prompt_ids.tolist()], n=3, seed=7)
    other = engine.generate(texts, n=3)
    assert [[one.text for one in group] for group in first] == [[one.text for one in group] for group in again]
    assert [one.text for one in of_ids] == [one.text for one in first[0]]
    assert [one.text for one in other[0]] != [one.text for one in first[0]]
    assert len({one.uid for group in (*first, *again, of_ids) for one in group}) == 5
    assert first[1][0].prompt_ids is first[1][2].prompt_ids


def test_a_prompt_that_is_asked_twice_has_other_completions(engine):
    first, second = engine.generate(["one plus one"] * 2, n=2)
    assert [one.text for one in first] != [one.text for one in second]


def test_a_reward_that_is_nan_was_not_scored(engine):
    (group,) = engine.generate(["one plus one"], n=3)
    samples = coati.group_samples(group, [1.0, float("nan"), 0.0])
    assert [sample.number for sample in samples] == [0, 2]
    assert [sample.arrays["advantages"] for sample in samples] == coati.advantages([1.0, 0.0])


def test_a_prompt_that_is_too_long_is_refused(engine):
    with pytest.raises(EngineError, match="1 of 1 prompts are refused"):
        engine.generate([[5] * 60], n=1)


@pytest.mark.parametrize("wrong", [{"stop": [""]}, {"temperature": np.nan}, {"top_k": 2.5}, {"seeds": 1}])
def test_sampling_that_there_is_not_is_refused_and_a_stop_text_is_one_text(engine, wrong):
    with pytest.raises(ConfigError, match=f"sampling '?{next(iter(wrong))}"):
        engine.generate(["one"], **wrong)
    (whole,), (asked,) = (engine.generate(["one"], seed=np.int64(7), stop=stop) for stop in ((), "abcdefghijk lmnop"))
    assert whole[0].token_ids.tolist() == asked[0].token_ids.tolist()


def test_scores_are_those_of_plain_transformers_in_the_order_of_the_samples(model_dir, samples):
    plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with coati.Trainer(model_dir, "grpo", **GRPO) as trainer:
        scores = trainer.score([*samples[4:], *samples[:4]])
    for sample, found in zip([*samples[4:], *samples[:4]], scores, strict=True):
        ids = torch.tensor([[*sample.prefix_ids, *sample.token_ids]])
        with torch.no_grad():
            logprobs = plain(input_ids=ids).logits[0, :-1].log_softmax(-1)
        right = logprobs.gather(-1, ids[0, 1:, None])[len(sample.prefix_ids) - 1 :, 0]
        np.testing.assert_allclose(found, right, atol=2e-5)


def test_calls_add_up_to_a_step(model_dir, samples):
    with coati.Trainer(model_dir, "dapo", **GRPO) as once, coati.Trainer(model_dir, "dapo", **GRPO) as twice:
        whole = once.forward_backward(samples)
        parts = [twice.forward_backward(part) for part in (samples[:4], samples[4:])]
        steps = once.optim_step(0.0), twice.optim_step(0.0)
    assert steps[0]["grad_norm"] == pytest.approx(steps[1]["grad_norm"], rel=1e-5)
    assert steps[1]["loss"] == pytest.approx(whole["loss"], abs=1e-6)
    assert all(part["logprob_gap_max"] < 1e-4 for part in parts)
    assert twice.step == 1


@pytest.mark.parametrize("variation", ["sample_level", "token_level"])
def test_a_loss_weighs_tokens_as_it_says(model_dir, samples, variation):
    seen = []

    def note(logprobs, entropy, arrays):
        seen.append(arrays["loss_weights"][arrays["loss_mask"]])
        return logprobs.sum()

    one = samples[0]
    with coati.Trainer(model_dir, note, loss_variation=variation, **LIMITS) as trainer:
        trainer.forward_backward([one])
    weight = 1 / one.num_loss_tokens if variation == "sample_level" else 1
    assert torch.cat(seen).tolist() == pytest.approx([weight] * one.num_loss_tokens)


def test_a_step_without_samples_changes_no_weight(model_dir):
    with coati.Trainer(model_dir, "grpo", **GRPO) as trainer:
        before = weights_of(trainer)
        assert trainer.forward_backward([]) == {}
        assert trainer.optim_step(1.0)["grad_norm"] == 0
        assert all(torch.equal(weight, before[name]) for name, weight in weights_of(trainer).items())


def test_whitened_advantages_are_of_all_calls_of_the_step(model_dir, samples):
    flags = {**GRPO, "whiten_advantages": True}
    with coati.Trainer(model_dir, "grpo", **flags) as once, coati.Trainer(model_dir, "grpo", **flags) as twice:
        assert once.forward_backward(samples) == {}
        for part in (samples[:3], samples[3:]):
            twice.forward_backward(part)
        steps = once.optim_step(0.0), twice.optim_step(0.0)
    assert steps[0]["grad_norm"] > 0
    assert steps[0]["grad_norm"] == pytest.approx(steps[1]["grad_norm"], rel=1e-5)


def reinforce(logprobs, entropy, arrays):
    terms = torch.where(arrays["loss_mask"], logprobs * arrays["advantages"] * arrays["loss_weights"], 0.0)
    return -terms.sum(), {"entropy": torch.where(arrays["loss_mask"], entropy, 0.0).detach().double().sum()}


def test_a_function_of_one_s_own_is_a_loss(model_dir, samples):
    with coati.Trainer(model_dir, reinforce, **LIMITS) as own, coati.Trainer(model_dir, "grpo", **GRPO) as grpo:
        metrics, right = own.forward_backward(samples), grpo.forward_backward(samples)
        steps = own.optim_step(0.0), grpo.optim_step(0.0)
    assert metrics["entropy"] == pytest.approx(right["entropy_mean"], rel=1e-5)
    assert steps[0]["grad_norm"] == pytest.approx(steps[1]["grad_norm"], rel=1e-4)  # on policy the ratio's is the same


def test_a_trainer_that_is_loaded_goes_on_as_if_it_had_not_ended(model_dir, samples, tmp_path):
    with coati.Trainer(model_dir, "grpo", **GRPO) as trainer:
        train(trainer, samples, steps=2)
        trainer.save(tmp_path / "step-2")
        right = train(trainer, samples)
    with coati.Trainer(model_dir, "grpo", **GRPO) as resumed:
        resumed.load(tmp_path / "step-2")
        assert resumed.step == 2
        found = train(resumed, samples)
    assert all(torch.equal(weight, right[name]) for name, weight in found.items())


def test_an_engine_serves_what_was_pushed_and_a_push_is_checked(model_dir, samples, monkeypatch):
    with (
        coati.Engine(model_dir, backend="transformers", **LIMITS) as engine,
        coati.Trainer(model_dir, "grpo", **GRPO) as trainer,
    ):
        before = engine.generate(["hello"], temperature=0.0)[0][0]
        assert trainer.push_to(engine).gap is None  # nothing was trained yet
        train(trainer, samples, steps=3, lr=5e-2)
        push = trainer.push_to(engine)
        assert (push.policy_version, len(push.digest)) == (3, 32)
        assert push.gap < 1e-4
        (after,) = engine.generate(["hello"], temperature=0.0)[0]
        assert after.text != before.text
        assert set(after.policy_versions.tolist()) == {3}
        (one,) = engine.generate(["hello"])[0]
        np.testing.assert_allclose(trainer.score([one.sample(0.0)])[0], one.logprobs, atol=1e-4)
        made = "producer.engines.transformers_engine.ProbeAnswer"  # by the engine, which is in this process
        monkeypatch.setattr(made, lambda logprobs, routes: ProbeAnswer(logprobs=logprobs - 1))
        with pytest.raises(RunError, match="from the trainer's"):
            trainer.push_to(engine)


def test_weights_are_pushed_to_one_engine_and_then_to_another(model_dir, samples):
    with (
        coati.Engine(model_dir, backend="transformers", **LIMITS) as first,
        coati.Engine(model_dir, backend="transformers", **LIMITS) as second,
        coati.Trainer(model_dir, "grpo", **GRPO) as trainer,
    ):
        for engine in (first, second, first):
            train(trainer, samples)
            trainer.push_to(engine, timeout_s=5.0)
            assert set(engine.generate(["hello"])[0][0].policy_versions.tolist()) == {trainer.step}
        assert set(second.generate(["hello"])[0][0].policy_versions.tolist()) == {2}


def test_an_engine_that_has_received_other_bytes_does_not_serve_them(model_dir, samples, monkeypatch):
    with (
        coati.Engine(model_dir, backend="transformers", **LIMITS) as engine,
        coati.Trainer(model_dir, "grpo", **GRPO) as trainer,
    ):
        train(trainer, samples)
        monkeypatch.setattr(engine.members._member, "stage", damaged(engine.members._member.stage))
        with pytest.raises(RunError, match="corrupt weight transfer"):
            trainer.push_to(engine)
        assert set(engine.generate(["hello"])[0][0].policy_versions.tolist()) == {0}


def damaged(stage):
    return lambda *arguments: [digest[::-1] for digest in stage(*arguments)]


@pytest.mark.parametrize(
    ("loss", "flags", "message"),
    [
        ("grpo", {"kl_coef": 0.0}, "kl_coef"),
        ("ppg", {}, "--algo 'ppg': unknown"),
        ("dpo", {"beta": -1.0}, "beta"),
        ("sft", {"tensor_parallel_size": 3}, "-tp 3"),
    ],
)
def test_a_mistake_is_told_before_anything_is_loaded(model_dir, loss, flags, message):
    with pytest.raises(ConfigError, match=message):
        coati.Trainer(model_dir, loss, **flags)


def test_rows_are_those_of_the_loss(model_dir, samples):
    rows = [{"prompt": "hello", "chosen": " you", "rejected": " me"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    with coati.Trainer(model_dir, "dpo", max_length=32, train_microbatch_size=1) as trainer:
        pairs = coati.rows(trainer, rows)
        assert len(pairs) == 4
        metrics = trainer.forward_backward(pairs)
        assert metrics["loss"] == pytest.approx(np.log(2), abs=1e-5)  # policy and reference are the same
        assert trainer.optim_step(1e-3)["grad_norm"] > 0
        reference, policy = trainer.score(pairs, "reference"), trainer.score(pairs)
    assert [len(one) for one in reference] == [pair.num_loss_tokens for pair in pairs]
    assert any((one != other).any() for one, other in zip(reference, policy, strict=True))
    with coati.Trainer(model_dir, "grpo", **GRPO) as trainer, pytest.raises(ConfigError, match="no format of rows"):
        coati.rows(trainer, rows)


def test_importing_it_imports_no_torch():
    code = "import sys, coati; print({'torch', 'ray', 'vllm', 'transformers'} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "set()"
