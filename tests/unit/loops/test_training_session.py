"""Test the training core of a server of Tinker's API: what it refuses, and that its steps are those of a trainer."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import coati
from coati_rl.errors import ConfigError
from coati_rl.model_files.adapter_files import PREFIX, WEIGHTS_FILE
from coati_rl.tinker.core import AdamStep, Datum, LossRequest, LossResult, ModelSpec, RequestError

STEP = AdamStep(learning_rate=1e-2, beta2=0.999, eps=1e-8, weight_decay=0.01)
TOKENS = [np.array([5, 6, 7, 8, 9]), np.array([9, 8, 7, 6, 5, 4, 3]), np.array([11, 12, 13])]


@pytest.fixture(scope="module")
def session(model_dir):
    with coati.TrainingSession(model_dir, device="cpu") as made:
        yield made


def datum(ids, **inputs):
    return Datum(tokens=ids[:-1], inputs={"target_tokens": ids[1:], **inputs})


def supervised(model):
    return LossRequest(model=model, data=[datum(ids) for ids in TOKENS], loss="cross_entropy")


def test_its_steps_are_those_of_a_trainer_with_the_same_adapters(session, model_dir, tmp_path):
    """Of summed cross-entropy, in two parts a step; both draw the adapters by the seed."""
    session.create("served", ModelSpec(rank=4, seed=42, trains_head=False))
    with coati.Trainer(model_dir, "sft", device="cpu", lora_rank=4, lora_alpha=32, seed=42) as trainer:
        for rate in (1e-2, 3e-3, 1e-3):
            norms = []
            for ids in (TOKENS[:2], TOKENS[2:]):
                mask = [np.arange(len(each)) > 0 for each in ids]
                trainer.forward_backward(
                    [
                        coati.Sample(
                            uid="row", number=0, prefix_ids=each[:0], token_ids=each, loss_mask=of_each, arrays={}
                        )
                        for each, of_each in zip(ids, mask, strict=True)
                    ]
                )
                request = LossRequest(model="served", data=[datum(each) for each in ids], loss="cross_entropy")
                session.forward_backward([request])
            norms.append(trainer.optim_step(rate, loss_scale=1.0, max_grad_norm=math.inf)["grad_norm"])
            norms.append(session.optim_step("served", replace(STEP, learning_rate=rate))["grad_norm:mean"])
            assert norms[0] == pytest.approx(norms[1], rel=1e-6)
        trainer.save(tmp_path / "trainer")
    session.save("served", tmp_path / "served", with_optimizer=True)
    expected, found = (load_file(tmp_path / name / WEIGHTS_FILE) for name in ("trainer", "served"))
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, atol=1e-6, rtol=0.0)
    assert any(each.abs().max() > 1e-3 for name, each in found.items() if "lora_B" in name)
    assert all(name.startswith(PREFIX) for name in found)


def test_a_wrong_request_is_an_answer_and_the_others_are_computed(session):
    session.create("a", ModelSpec(rank=2))
    good, wrong = supervised("a"), replace(supervised("a"), loss="stable_reinforce")
    first, second, third = session.forward_backward([good, wrong, replace(good, model="nobody")])
    assert isinstance(first, LossResult) and first.metrics["loss:sum"] > 0
    assert str(second) == "loss_fn='stable_reinforce': no formula is published; use loss_fn=importance_sampling"
    assert str(third) == "model 'nobody' is unknown; create or load it first"


IDS = np.array([3, 4, 5])
FLOATS = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": "grpo"}, "loss_fn='grpo' is unknown; use cross_entropy"),
        ({"data": []}, "data: is empty"),
        ({"settings": {"beta": 0.1}}, r"loss_fn_config\['beta'\]: cross_entropy has no setting"),
        ({"loss": "dro", "settings": {"beta": "x"}}, r"loss_fn_config\['beta'\]='x': use a finite number"),
        (
            {"loss": "ppo", "settings": {"clip_low_threshold": 1.3}},
            "clip_low_threshold'.=1.3 is above clip_high_threshold=1.2: both are bounds of the ratio",
        ),
        ({"loss": "ppo"}, r"data\[0\]: ppo needs loss_fn_inputs\['logprobs'\]"),
        ({"data": [datum(IDS, weights=np.ones(3, np.float32))]}, r"weights has the shape \(3,\)"),
        ({"data": [datum(IDS, weights=FLOATS * np.nan)]}, "weights has a value that is not finite"),
        ({"data": [datum(IDS), datum(np.array([3, -1, 4]))]}, r"data\[1\]: tokens has an id outside 0\.\."),
        ({"data": [datum(np.array([3, 4, 10**6]))]}, "target_tokens has an id outside 0.."),
        ({"data": [datum(np.array([3]))]}, r"data\[0\]: has 0 tokens; send 1 to"),
        ({"data": [Datum(tokens=IDS, inputs={"target_tokens": IDS[:2]})]}, "target_tokens has the shape"),
    ],
)
def test_a_mistake_is_named_with_its_field_and_a_remedy(session, change, message):
    session.create("m", ModelSpec(rank=1))
    with pytest.raises(RequestError, match=message):
        session.check(replace(supervised("m"), **change))
    session.drop("m")


def test_mistakes_of_models_steps_and_layouts(session, model_dir, tmp_path):
    session.create("n", ModelSpec(rank=1))
    with pytest.raises(RequestError, match="is there already"):
        session.create("n", ModelSpec(rank=1))
    with pytest.raises(RequestError, match="all false"):
        session.create("o", ModelSpec(trains_attention=False, trains_mlp=False, trains_head=False))
    with pytest.raises(RequestError, match="learning_rate=nan: use a finite number"):
        session.optim_step("n", AdamStep(learning_rate=math.nan))
    with pytest.raises(RequestError, match="eps=0: use a number above 0"):
        session.optim_step("n", AdamStep(learning_rate=1e-3, eps=0.0))
    with pytest.raises(RequestError, match="is no directory"):
        session.load("n", tmp_path / "nowhere", with_optimizer=False)
    for name in ("pipeline_parallel_size", "context_parallel_size", "context_parallel"):  # the last is its flag's name
        with pytest.raises(ConfigError, match=f"{name}.*=2: .*leave it out"):
            coati.TrainingSession(model_dir, device="cpu", **{name: 2})


def test_a_step_that_overflows_is_refused_and_the_next_ones_too_until_the_model_is_loaded(session, tmp_path):
    session.create("x", ModelSpec(rank=1))
    session.save("x", tmp_path / "before", with_optimizer=False)
    session.forward_backward([supervised("x")])
    session.optim_step("x", AdamStep(learning_rate=1e38))
    session.forward_backward([supervised("x")])
    with pytest.raises(RequestError, match="the gradient is not finite"):
        session.optim_step("x", STEP)
    session.load("x", tmp_path / "before", with_optimizer=False)
    (result,) = session.forward_backward([supervised("x")])
    assert math.isfinite(result.metrics["loss:sum"])
    assert session.optim_step("x", STEP)["grad_norm:mean"] > 0
