"""Test that an engine and a trainer of one's own loop share a device in turns, and share weights."""

import numpy as np
import pytest
import torch

import coati
from coati_rl.errors import ConfigError, EngineError, RunError

LIMITS = {"max_prompt_tokens": 32, "max_new_tokens": 8}
GRPO = {**LIMITS, "kl_coeff": 0.0, "train_microbatch_size": 8}
PROMPTS = ["one plus one", "two plus two"]


def make_engine(model, **flags):
    return coati.Engine(model, backend="transformers", seed=3, **LIMITS, **flags)


def backend_of(trainer):
    return trainer.members._member._backend


def weights_of(trainer):
    return {name: weight.clone() for name, weight in backend_of(trainer).export_weights()}


def samples_of(engine):
    groups = engine.generate(PROMPTS, n=4)
    ids = [[*map(int, one.token_ids)] for group in groups for one in group]
    return [sample for group in groups for sample in coati.group_samples(group, [0.0, 1.0, 1.0, 0.0])], ids


def train(trainer, samples):
    trainer.forward_backward(samples)
    return trainer.optim_step(1e-2)["grad_norm"]


def bytes_on_device(tensors):
    return sum(each.untyped_storage().nbytes() for each in tensors)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_three_steps_in_turns_are_those_apart_bit_for_bit(model_dir, precision):
    flags = {"precision": precision}
    found = []
    for in_turns in (False, True):
        with make_engine(model_dir, **flags) as engine, coati.Trainer(model_dir, "grpo", **GRPO, **flags) as trainer:
            steps = []
            for _ in range(3):
                samples, ids = samples_of(engine)
                if in_turns:
                    engine.sleep()
                    trainer.cuda()
                norm = train(trainer, samples)
                push = trainer.push_to(engine)
                if in_turns:
                    assert push.gap is None
                    trainer.cpu()
                    assert bytes_on_device(backend_of(trainer).policy.module.parameters()) == 0
                    push = engine.wake()
                assert push.gap is not None
                steps.append((ids, norm, push.digest, push.gap))
            trainer.cuda()
            found.append((steps, weights_of(trainer)))
    (apart, weights), (turns, weights_in_turns) = found
    assert apart == turns
    assert len({digest for _, _, digest, _ in apart}) == 3
    assert all(torch.equal(weight, weights_in_turns[name]) for name, weight in weights.items())


def test_an_engine_that_sleeps_says_what_wakes_it(model_dir):
    with make_engine(model_dir) as engine, coati.Trainer(model_dir, "grpo", **GRPO) as trainer:
        engine.meta()  # RLite's word
        with pytest.raises(EngineError, match=r"the engine sleeps: trainer.push_to\(engine\), then engine.wake\(\)"):
            engine.generate(PROMPTS)
        with pytest.raises(EngineError, match="no weights to wake with"):
            engine.cuda("kv_cache")
        with pytest.raises(ConfigError, match=r'engine.cuda\("cache"\): an engine has weights and kv_cache'):
            engine.cuda("cache")
        engine.cuda("weights")
        trainer.push_to(engine)
        with pytest.raises(EngineError, match="the engine sleeps"):
            engine.generate(PROMPTS)
        engine.cuda("kv_cache")
        assert engine.generate(PROMPTS)[0][0].policy_versions.tolist()[0] == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_optimizer_leaves_the_device_and_weights_stay(model_dir, precision):
    flags = {**GRPO, "precision": precision}
    with make_engine(model_dir, precision=precision) as engine, coati.Trainer(model_dir, "grpo", **flags) as trainer:
        samples, _ = samples_of(engine)
        train(trainer, samples)
        scores = trainer.score(samples)
        policy = backend_of(trainer).policy
        moments = [each for state in policy.torch_optimizer.state.values() for each in state.values() if each.dim()]
        masters = [*policy.masters().values()]
        assert bytes_on_device(moments) == 2 * bytes_on_device(masters) > 0
        trainer.cpu("optimizer")
        num_bytes = bytes_on_device(moments)
        assert num_bytes == 0
        num_bytes = bytes_on_device(masters)  # before the assertion, which would show memory that is away
        assert (num_bytes > 0) == (precision == "fp32")  # they are the weights then
        assert all(np.array_equal(one, other) for one, other in zip(scores, trainer.score(samples), strict=True))
        trainer.forward_backward(samples)
        with pytest.raises(RunError, match=r"the trainer's optimizer must be on its device: trainer.cuda\(\)"):
            trainer.optim_step()
        trainer.cuda("optimizer")
        trainer.optim_step(1e-2)
        after = weights_of(trainer)
    with coati.Trainer(model_dir, "grpo", **flags) as trainer:
        train(trainer, samples)
        train(trainer, samples)
        right = weights_of(trainer)
    assert all(torch.equal(weight, right[name]) for name, weight in after.items())


def test_calls_that_need_what_is_parked_are_refused(model_dir, tmp_path):
    with make_engine(model_dir) as engine, coati.Trainer(model_dir, "grpo", **GRPO) as trainer:
        samples, _ = samples_of(engine)
        train(trainer, samples)
        trainer.save(tmp_path / "saved")
        weights = weights_of(trainer)
        trainer.cpu("weights")
        trainer.cpu()  # what is offloaded already stays
        for call in (
            lambda: trainer.forward_backward(samples),
            lambda: trainer.score(samples),
            lambda: trainer.push_to(engine),
            lambda: trainer.save(tmp_path / "other"),
        ):
            with pytest.raises(RunError, match="the trainer's weights must be on its device"):
                call()
        with pytest.raises(ConfigError, match='a trainer has weights and optimizer, and no "kv_cache"'):
            trainer.cuda("kv_cache")
        trainer.meta()
        with pytest.raises(RunError, match=r"dropped by meta\(\): trainer.load\(directory\)"):
            trainer.cuda()
        trainer.load(tmp_path / "saved")
        assert all(torch.equal(weight, weights[name]) for name, weight in weights_of(trainer).items())
        assert trainer.step == 1
        trainer.cpu()  # and closes while it is offloaded


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
def test_an_engine_of_a_trainer_reads_its_weights_where_they_are(model_dir, tmp_path, precision):
    flags = {**GRPO, "precision": precision}
    with coati.Trainer(model_dir, "grpo", **flags) as trainer, make_engine(trainer) as engine:
        with make_engine(model_dir, precision=precision) as other:
            for step in range(3):
                samples, ids = samples_of(engine)
                assert ids == samples_of(other)[1]
                assert {*samples[0].arrays["policy_version"]} == {step}
                held = engine.members._member._engine._transformers._parameters
                own = trainer.live_weights()
                assert {each.data_ptr() for each in held.values()} == {each.data_ptr() for each in own.values()}
                train(trainer, samples)
                pushed, copied = trainer.push_to(engine), trainer.push_to(other)
                assert pushed.gap == copied.gap
                assert pushed.digest == ""
        trainer.save(tmp_path / "saved")
        trainer.cpu()
        with pytest.raises(RunError, match="the trainer's weights must be on its device"):
            engine.generate(PROMPTS)
        trainer.cuda()
        samples, _ = samples_of(engine)
        trainer.load(tmp_path / "saved")  # other tensors
        scores = trainer.score(samples)
        found, _ = samples_of(engine)
        assert {*found[0].arrays["policy_version"]} == {3}
        gaps = [abs(a - s.arrays["rollout_logprobs"]).max() for a, s in zip(scores, samples, strict=True)]
        assert max(gaps) < (1e-5 if precision == "fp32" else 0.1)


def test_an_engine_of_a_trainer_needs_whole_weights_and_transformers(model_dir):
    with coati.Trainer(model_dir, "grpo", **GRPO) as trainer:
        with pytest.raises(ConfigError, match=r'Engine\(trainer, backend="vllm"\): only "transformers"'):
            coati.Engine(trainer, backend="vllm", **LIMITS)
        with pytest.raises(ConfigError, match="its weights are in several processes"):
            coati.Engine(trainer, on=object(), **LIMITS)
    with (
        coati.Trainer(model_dir, "grpo", lora_rank=4, **GRPO) as trainer,
        pytest.raises(ConfigError, match="the trainer's adapters are merged when they are sent"),
    ):
        coati.Engine(trainer, **LIMITS)
