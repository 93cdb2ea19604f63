"""Compare losses of preferences with TRL's on the same tensors: value, gradient, and common metrics.

TRL's own code runs, on an object that has only the attributes it reads: `DPOTrainer._compute_loss`,
`KTOTrainer._compute_loss`, and of the experimental trainers `ORPOTrainer.get_batch_loss_metrics` and
`CPOTrainer.get_batch_loss_metrics` (SimPO, and DPO with label smoothing, which is there alone). Where TRL averages the
chosen completions' negative log-likelihood over the tokens of its micro-batch, it gets one pair at a time, as here each
pair counts alike.
"""

from collections import defaultdict
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from consumer.objectives.kto import Kto
from consumer.objectives.preference import Preference
from tests.unit.algorithms.importing_trl import importing_trl
from tests.unit.algorithms.preference_oracle import Completion
from tests.unit.algorithms.units import evaluate, evaluate_kto, micro_batches_of, random_completions, samples_of

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("ignore:TRL currently supports vLLM", "ignore:You are importing from .trl.experimental"),
]

TRL_VERSION = "1.16.0"
SEEDS = pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3))])
ONE_PROCESS = SimpleNamespace(device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x)
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins")
COMMON = (*REWARDS, "rewards/accuracies", "logps/chosen", "logps/rejected")


@pytest.fixture(scope="module")
def trl() -> SimpleNamespace:
    assert version("trl") == TRL_VERSION
    with importing_trl():
        from trl.experimental.cpo import CPOTrainer
        from trl.experimental.orpo import ORPOTrainer
        from trl.trainer.dpo_trainer import DPOTrainer
        from trl.trainer.kto_trainer import KTOTrainer
    return SimpleNamespace(cpo=CPOTrainer, dpo=DPOTrainer, kto=KTOTrainer, orpo=ORPOTrainer)


class Padded:
    """Completions as TRL has them: float64[B, T], 0 on the one prompt token and after the end."""

    def __init__(self, completions: list[Completion]) -> None:
        self.lengths = torch.tensor([len(each.policy) for each in completions])
        self.mask = torch.arange(1 + int(self.lengths.max()))[None] <= self.lengths[:, None]
        self.mask[:, 0] = False
        self.logprobs = self._padded([each.policy for each in completions]).requires_grad_()
        self.reference = self._padded([each.reference for each in completions]).sum(dim=1)

    def _padded(self, values: list[np.ndarray]) -> Tensor:
        filled = torch.zeros(self.mask.shape, dtype=torch.float64)
        for row, each in zip(filled, values, strict=True):
            row[1 : 1 + len(each)] = torch.tensor(each)
        return filled

    def outputs(self, *_: Any, **__: Any) -> SimpleNamespace:
        """What TRL's patched model returns, for the tokens after the first."""
        shifted = self.logprobs[:, 1:]
        rest = torch.zeros_like(shifted)
        return SimpleNamespace(log_probs=shifted, entropy=rest, mean_logits=rest, is_top1=rest.bool())

    @property
    def inputs(self) -> dict[str, Tensor]:
        ids = torch.zeros(self.mask.shape, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": ids + 1, "completion_mask": self.mask.long()}

    @property
    def gradients(self) -> list[np.ndarray]:
        grad = torch.zeros_like(self.logprobs) if self.logprobs.grad is None else self.logprobs.grad
        return [row[1 : 1 + length].numpy() for row, length in zip(grad, self.lengths.tolist(), strict=True)]


def model_of(padded: Padded) -> Any:
    class Model:
        training = True

        def __call__(self, *arguments: Any, **settings: Any) -> SimpleNamespace:
            return padded.outputs(*arguments, **settings)

    return Model()


Result = tuple[float, list[np.ndarray], dict[str, float]]


def theirs_dpo(trl: SimpleNamespace, completions: list[Completion], **settings: Any) -> Result:
    """TRL has all chosen completions first."""
    padded = Padded([*completions[::2], *completions[1::2]])
    metrics: dict[str, list[float]] = defaultdict(list)
    stand_in = SimpleNamespace(
        **{"label_smoothing": 0.0, "loss_types": ["sigmoid"], "loss_weights": [1.0], "beta": 0.1, **settings},
        model=SimpleNamespace(training=True),
        accelerator=ONE_PROCESS,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, gradient_checkpointing=False),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        _metrics={"train": metrics},
        _total_train_tokens=0,
        _tp_size=1,
    )
    chosen, rejected = padded.reference.chunk(2)
    inputs = {**padded.inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    loss = trl.dpo._compute_loss(stand_in, model_of(padded), inputs, False)
    loss.backward()
    half = len(padded.gradients) // 2
    gradients = [g for pair in zip(padded.gradients[:half], padded.gradients[half:], strict=True) for g in pair]
    return loss.item(), gradients, {name: values[0] for name, values in metrics.items()}


def theirs_without_reference(trainer: Any, completions: list[Completion], loss: str, **settings: Any) -> Result:
    """One pair at a time; mean log-probabilities per token, or with "sigmoid" log-ratios in their place."""
    total, gradients, metrics = 0.0, list[np.ndarray](), defaultdict[str, list[float]](list)
    for start in range(0, len(completions), 2):
        padded = Padded(completions[start : start + 2])
        sums, lengths = padded.logprobs.sum(dim=1), padded.lengths
        logps = sums - padded.reference if loss == "sigmoid" else sums / lengths
        nll = -sums[0] / lengths[0]
        logits = torch.zeros(1)
        stand_in = SimpleNamespace(
            **{"label_smoothing": 0.0, "simpo_gamma": 0.0, "cpo_alpha": 0.0, "alpha": 0.0, **settings},
            loss_type=loss,
            accelerator=ONE_PROCESS,
            aux_loss_enabled=False,
            concatenated_forward=lambda model, batch, f=(logps[:1], logps[1:], logits, logits, nll): f,
        )
        for name in ("cpo_loss", "odds_ratio_loss"):
            if hasattr(trainer, name):
                setattr(stand_in, name, getattr(trainer, name).__get__(stand_in))
        value, of_pair = trainer.get_batch_loss_metrics(stand_in, None, {})
        value.backward()
        total += value.item()
        gradients += padded.gradients
        for name, number in of_pair.items():
            metrics[name].append(float(number))
    count = len(completions) // 2
    means = {name: sum(numbers) / count for name, numbers in metrics.items()}
    return total / count, [gradient / count for gradient in gradients], means


def theirs_kto(trl: SimpleNamespace, completions: list[Completion], labels: list[bool], **settings: Any) -> Result:
    """Every second completion is the mismatched one of the example before it."""
    padded, mismatched = Padded(completions[::2]), Padded(completions[1::2])
    metrics: dict[str, list[float]] = defaultdict(list)
    stand_in = SimpleNamespace(
        **{"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, **settings},
        model=SimpleNamespace(training=True),
        accelerator=ONE_PROCESS,
        aux_loss_enabled=False,
        calculate_KL=True,
        loss_type="kto",
        precompute_ref_logps=True,
        _compute_kl_logps=lambda model, batch: mismatched.logprobs.sum(dim=1).detach(),
        _metrics={"train": metrics},
        _total_train_tokens=0,
        _tp_size=1,
    )
    references = {"ref_logps": padded.reference, "ref_KL_logps": mismatched.reference}
    inputs = {**padded.inputs, **references, "label": torch.tensor(labels)}
    loss = trl.kto._compute_loss(stand_in, model_of(padded), inputs, False)
    loss.backward()
    return loss.item(), padded.gradients, {name: values[0] for name, values in metrics.items()}


def ours(loss: Preference, completions: list[Completion]) -> Result:
    value, gradients, sums = evaluate(loss, micro_batches_of(samples_of(completions), max_samples=4))
    scale = 2 / len(completions)
    metrics = loss.metrics({**sums, "equal_pairs": 0.0}, loss_scale=scale)
    return value * scale, [gradient * scale for gradient in gradients], metrics


def assert_same(found: Result, expected: Result, *names: str) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-9)
    for name in names:
        assert found[2][name] == pytest.approx(expected[2][name], rel=1e-5), name


@SEEDS
def test_dpo_is_trls(trl: SimpleNamespace, seed: int) -> None:
    completions = random_completions(seed)
    assert_same(ours(Preference(beta=0.3), completions), theirs_dpo(trl, completions, beta=0.3), *COMMON)


@SEEDS
def test_robust_dpo_is_trls(trl: SimpleNamespace, seed: int) -> None:
    completions = random_completions(seed)
    settings = {"beta": 0.7, "label_smoothing": 0.2}
    expected = theirs_dpo(trl, completions, loss_types=["robust"], **settings)
    assert_same(ours(Preference(loss="robust", **settings), completions), expected, *COMMON)


@SEEDS
def test_ipo_is_trls_which_has_means_over_tokens(trl: SimpleNamespace, seed: int) -> None:
    completions = random_completions(seed)
    expected = theirs_dpo(trl, completions, loss_types=["ipo"], beta=0.4)
    assert_same(ours(Preference(loss="ipo", beta=0.4), completions), expected, *COMMON)


@SEEDS
def test_label_smoothing_of_dpo_is_trls_of_cpo_with_log_ratios_in_place_of_log_probabilities(
    trl: SimpleNamespace, seed: int
) -> None:
    completions = random_completions(seed)
    settings = {"beta": 0.7, "label_smoothing": 0.2}
    expected = theirs_without_reference(trl.cpo, completions, "sigmoid", **settings)
    assert_same(ours(Preference(**settings), completions), expected, *REWARDS)


@SEEDS
def test_dpo_with_the_chosen_completions_likelihood_is_trls_sigmoid_plus_sft(trl: SimpleNamespace, seed: int) -> None:
    completions = random_completions(seed)
    pairs = [
        theirs_dpo(trl, completions[i : i + 2], loss_types=["sigmoid", "sft"], loss_weights=[1.0, 0.6])
        for i in range(0, len(completions), 2)
    ]
    mean = sum(pair[0] for pair in pairs) / len(pairs)
    gradients = [gradient / len(pairs) for pair in pairs for gradient in pair[1]]
    assert_same(ours(Preference(nll_coeff=0.6), completions), (mean, gradients, {}))


@SEEDS
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("nll_coeff", [0.0, 0.4])
def test_simpo_is_trls(trl: SimpleNamespace, seed: int, label_smoothing: float, nll_coeff: float) -> None:
    completions = random_completions(seed)
    settings = {"beta": 2.0, "simpo_gamma": 0.8, "label_smoothing": label_smoothing}
    expected = theirs_without_reference(trl.cpo, completions, "simpo", **settings, cpo_alpha=nll_coeff)
    found = ours(Preference(loss="simpo", **settings, nll_coeff=nll_coeff), completions)
    assert_same(found, expected, *COMMON, "nll_loss")


@SEEDS
def test_orpo_is_trls_but_for_the_prompts_likelihood(trl: SimpleNamespace, seed: int) -> None:
    # TRL's likelihood is of prompt and completion; here both have that of the completion, as in the paper.
    completions = random_completions(seed)
    expected = theirs_without_reference(trl.orpo, completions, "orpo", beta=0.5)
    assert_same(ours(Preference(loss="orpo", orpo_lambda=0.5), completions), expected, *COMMON, "nll_loss")


@SEEDS
def test_kto_is_trls(trl: SimpleNamespace, seed: int) -> None:
    completions, labels = random_completions(seed), [True, False, False, True]
    settings = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    expected = theirs_kto(trl, completions, labels, **settings)
    value, gradients, sums = evaluate_kto(Kto(**settings), completions, labels)
    metrics = Kto(**settings).metrics(sums, loss_scale=1 / 4)
    found = value / 4, [gradient / 4 for gradient in gradients], metrics
    assert_same(found, expected, *REWARDS, "logps/chosen", "logps/rejected", "kl")
