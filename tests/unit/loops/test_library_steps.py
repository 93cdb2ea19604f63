"""Test which numbers and samples a step of a library's trainer takes, and how it goes on after a failure."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import coati
from coati_rl.errors import ConfigError, EngineError
from tests.unit.loops.test_library import LIMITS

PROMPT = np.array([40, 41, 42, 43], dtype=np.int32)


def sample_of(number: int = 0, **arrays: Any) -> coati.Sample:
    ids, mask = np.arange(5, 9) + number, np.ones(4, dtype=bool)
    return coati.Sample(
        uid="p", number=number, prefix_ids=PROMPT, token_ids=ids, loss_mask=mask, arrays={"advantages": 1.0, **arrays}
    )


def reinforce(logprobs: Any, entropy: Any, arrays: Any) -> Any:
    return -torch.where(arrays["loss_mask"], logprobs * arrays["advantages"], 0.0).sum()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"lr": math.nan}, "lr=nan"),
        ({"lr": -1e-3}, "lr=-0.001"),
        ({"loss_scale": -1.0}, "loss_scale=-1.0"),
        ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0"),
        ({"adam_betas": (0.9, 1.5)}, "adam_betas=(0.9, 1.5)"),
        ({"adam_eps": 0.0}, "adam_eps=0.0"),
        ({"weight_decay": math.inf}, "weight_decay=inf"),
        ({"max_norm": 1.0}, "max_norm=...): a step has adam_betas"),
    ],
)
def test_a_number_that_ruins_weights_is_refused_and_the_step_can_be_taken_with_another(
    model_dir: Any, numbers: dict[str, Any], message: str
) -> None:
    with coati.Trainer(model_dir, reinforce, **LIMITS) as trainer:
        trainer.forward_backward([sample_of()])
        with pytest.raises(ConfigError) as refused:
            trainer.optim_step(**numbers)
        assert message in str(refused.value)
        step = trainer.optim_step(1e-3, max_grad_norm=math.inf, adam_betas=(0.8, 0.9))
        assert step["grad_norm"] > 0
        assert trainer.step == 1
        assert all(weight.isfinite().all() for weight in trainer.live_weights().values())


@pytest.mark.parametrize("loss", ["own", "ppo"])
def test_after_a_gradient_that_is_not_finite_the_next_step_is_of_its_own_samples_alone(
    model_dir: Any, loss: str
) -> None:
    of_ppo = {"rollout_logprobs": -5.0, "policy_version": 0, "token_rewards": 1.0, "is_cut": 0.0}
    flags = {**LIMITS, **({} if loss == "own" else {"kl_coeff": 0.0, "whiten_advantages": False})}
    good = sample_of(**({} if loss == "own" else of_ppo))
    bad = sample_of(1, **({"advantages": math.inf} if loss == "own" else {**of_ppo, "token_rewards": math.inf}))
    steps = []
    for before in ((), (good, bad)):
        with coati.Trainer(model_dir, reinforce if loss == "own" else loss, **flags) as trainer:
            for sample in before:
                trainer.forward_backward([sample])
            if before:
                with pytest.raises(EngineError, match="the gradient norm is nan"):
                    trainer.optim_step(1e-3)
                assert trainer.step == 0
            trainer.forward_backward([good])
            steps.append(trainer.optim_step(1e-3))
    names = [name for name in steps[0] if name != "train_s"]
    assert {name: steps[1][name] for name in names} == {name: steps[0][name] for name in names}


def test_a_call_that_fails_in_the_trainer_leaves_no_part_of_a_gradient(model_dir: Any) -> None:
    calls = list[Any]()

    def failing(logprobs: Any, entropy: Any, arrays: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return reinforce(logprobs, entropy, arrays)

    norms = []
    for is_failing in (False, True):
        with coati.Trainer(model_dir, failing if is_failing else reinforce, train_microbatch_size=1, **LIMITS) as own:
            if is_failing:
                with pytest.raises(RuntimeError, match="out of memory"):
                    own.forward_backward([sample_of(), sample_of(1)])  # a micro-batch each
            own.forward_backward([sample_of()])
            norms.append(own.optim_step(0.0)["grad_norm"])
    assert norms[0] == norms[1] > 0


@pytest.mark.parametrize(
    ("loss", "arrays", "message"),
    [
        ("value", {}, "p, sample 0: has no array 'returns', which the loss reads"),  # else it would learn 0
        ("prm", {}, "'step_label', which the loss reads"),
        ("kto", {}, "'label', which the loss reads"),
        ("grpo", {"rollout_logprobs": -5.0}, "'policy_version', which the loss reads"),
        ("ppo", {"rollout_logprobs": -5.0, "policy_version": 0}, "'token_rewards', which the loss reads"),
    ],
)
def test_a_sample_that_lacks_what_the_loss_reads_is_refused(
    model_dir: Any, loss: str, arrays: dict[str, Any], message: str
) -> None:
    flags = {**LIMITS, "kl_coeff": 0.0} if loss in ("grpo", "ppo") else {}
    labels = {"reward_tokens": ("a", "b")} if loss == "prm" else {}
    with coati.Trainer(model_dir, loss, **flags, **labels) as trainer:
        with pytest.raises(ConfigError) as refused:
            trainer.forward_backward([sample_of(**arrays), sample_of(1, **arrays)])
        assert message in str(refused.value)


def test_samples_of_a_call_hold_the_same_arrays(model_dir: Any) -> None:
    with coati.Trainer(model_dir, reinforce, **LIMITS) as trainer:
        with pytest.raises(ConfigError, match="p, sample 0: has no array 'bonus', which another sample holds"):
            trainer.forward_backward([sample_of(), sample_of(1, bonus=1.0)])
        trainer.forward_backward([sample_of(bonus=0.0), sample_of(1, bonus=1.0)])
        assert trainer.optim_step(0.0)["grad_norm"] > 0


@pytest.mark.parametrize("as_reported", [float, lambda each: each])
def test_a_loss_of_one_s_own_reports_means_over_tokens_and_maxima(model_dir: Any, as_reported: Any) -> None:
    def reporting(logprobs: Any, entropy: Any, arrays: Any) -> Any:
        bonus = torch.where(arrays["loss_mask"], arrays["bonus"], -math.inf).amax()
        sums = {"bonus": arrays["bonus"][arrays["loss_mask"]].sum(), "bonus_max": bonus}
        return reinforce(logprobs, entropy, arrays), {name: as_reported(each) for name, each in sums.items()}

    with coati.Trainer(model_dir, reporting, train_microbatch_size=1, **LIMITS) as trainer:
        found = trainer.forward_backward([sample_of(bonus=3.0), sample_of(1, bonus=5.0)])
        step = trainer.optim_step(0.0)
    assert (found["bonus"], found["bonus_max"]) == (step["bonus"], step["bonus_max"]) == (4.0, 5.0)


@pytest.mark.parametrize(
    ("loss", "flags", "message"),
    [
        ("grpo", {"kl_coeff": 0.1, "reference_update": "ema=0.999", "precision": "bf16"}, "rounds away"),
        ("dpo", {"precompute_reference": True}, "precompute_reference=True: .*leave it out"),
    ],
)
def test_a_reference_that_the_library_could_not_keep_is_refused(model_dir, loss, flags, message):
    with pytest.raises(ConfigError, match=message):
        coati.Trainer(model_dir, loss, **flags)


def test_an_estimator_of_no_name_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"rloo2: unknown; use .*group_norm.*FILE\.py:FUNCTION"):
        coati.advantages([1.0, 0.0], estimator="rloo2")
