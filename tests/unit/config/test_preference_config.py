"""Test the settings of preference losses and KTO: their defaults, and what a loss does not read."""

from typing import Any

import pytest
from pydantic import ValidationError

from coati_rl.config.cli import build_job
from coati_rl.config.commands import OFFLINE
from coati_rl.config.jobs.dpo import PreferenceConfig
from coati_rl.config.jobs.kto import KtoConfig
from consumer.jobs.offline import objective_of
from consumer.objectives.kto import Kto
from consumer.objectives.objective import Objective
from consumer.objectives.preference import Preference


def built(job: str, **given: Any) -> Objective:
    return objective_of(build_job({"model": "m", "dataset": "d", **given}, OFFLINE[job]))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Preference(loss="dpo", beta=0.1)),
        (
            {"label_smoothing": 0.1, "nll_coeff": 0.2},
            Preference(loss="dpo", beta=0.1, label_smoothing=0.1, nll_coeff=0.2),
        ),
        ({"loss": "simpo"}, Preference(loss="simpo", beta=2.0, simpo_gamma=0.5)),
        ({"loss": "simpo", "beta": 5.0, "simpo_gamma": 0.0}, Preference(loss="simpo", beta=5.0, simpo_gamma=0.0)),
        ({"loss": "orpo"}, Preference(loss="orpo", orpo_lambda=0.1)),
        ({"loss": "orpo", "orpo_lambda": 1.0}, Preference(loss="orpo", orpo_lambda=1.0)),
        ({"loss": "robust", "label_smoothing": 0.3}, Preference(loss="robust", label_smoothing=0.3)),
        ({"loss": "ipo", "beta": 0.5}, Preference(loss="ipo", beta=0.5)),
    ],
)
def test_an_objective_has_the_settings_that_are_given_and_its_losses_defaults(
    given: dict, expected: Preference
) -> None:
    assert built("dpo", **given) == expected


def test_precomputed_reference_log_probabilities_leave_out_the_reference() -> None:
    assert built("dpo", precompute_reference=True).roles == {"policy"}
    assert built("kto", precompute_reference=True).roles == {"policy"}
    assert built("kto").roles == built("dpo").roles == {"policy", "reference"}


def test_ktos_objective_has_the_settings_that_are_given() -> None:
    settings = {"beta": 0.3, "desirable_weight": 1.33, "undesirable_weight": 0.5}
    assert built("kto", **settings) == Kto(**settings)


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (PreferenceConfig, {"loss": "sigmoid"}, "Input should be 'dpo', 'ipo', 'robust', 'simpo' or 'orpo'"),
        (PreferenceConfig, {"beta": 0}, "greater than 0"),
        (PreferenceConfig, {"label_smoothing": 0.5}, "less than 0.5"),
        (PreferenceConfig, {"loss": "ipo", "label_smoothing": 0.1}, "--loss ipo: only for dpo, robust, simpo"),
        (PreferenceConfig, {"loss": "orpo", "beta": 0.1}, "--beta 0.1 with --loss orpo: its weight is --orpo-lambda"),
        (PreferenceConfig, {"loss": "orpo", "nll_coeff": 1}, "--nll-coeff 1 with --loss orpo: orpo has this term"),
        (PreferenceConfig, {"simpo_gamma": 1}, "--simpo-gamma 1 with --loss dpo: only simpo has it; leave it out"),
        (PreferenceConfig, {"orpo_lambda": 1}, "--orpo-lambda 1 with --loss dpo: only orpo has it; leave it out"),
        (PreferenceConfig, {"loss": "robust"}, "--loss robust needs --label-smoothing above 0"),
        (KtoConfig, {"beta": 0}, "greater than 0"),
        (KtoConfig, {"desirable_weight": 0, "undesirable_weight": 0}, "train nothing; raise one of them"),
    ],
)
def test_what_a_loss_does_not_read_is_refused(config: Any, given: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**given)
