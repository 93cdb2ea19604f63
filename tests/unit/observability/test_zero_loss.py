"""Test that a loss of 0 is explained, once, by its cause."""

import pytest

from coati_rl.observability.zero_loss import ZeroLoss

MIXED = {
    **{"step": 3, "loss": 0.0, "grad_norm": 0.0, "reward_mean": 0.5, "groups_total": 8, "groups_filtered": 0},
    **{"constant_group_fraction": 0.25, "groups_all_correct": 1, "groups_all_wrong": 1, "samples_in_loss": 64},
}
EQUAL = MIXED | {"constant_group_fraction": 1.0, "groups_all_correct": 5, "groups_all_wrong": 3}


def line(record):
    return ZeroLoss().line(record)


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (EQUAL, "loss 0 at step 3: all 8 groups have equal rewards (5 all right, 3 all wrong): nothing to learn from"),
        (
            EQUAL | {"groups_all_wrong": 2},  # of one group no two samples were scored
            "loss 0 at step 3: of 8 groups all that can be compared have equal rewards (5 all right, 2 all wrong): "
            "nothing to learn from",
        ),
        (
            EQUAL | {"loss": 2e-6, "grad_norm": 0.015},  # of KL
            "loss 2e-06 at step 3: all 8 groups have equal rewards (5 all right, 3 all wrong): the gradient (norm "
            "0.015) is of other terms than these rewards",
        ),
        (
            MIXED | {"loss": -1e-9, "grad_norm": 0.3},
            "loss -1e-09 at step 3: a group's advantages have mean 0, so that better and worse answers cancel in the "
            "value while the policy is the one that sampled them; not in the gradient (norm 0.3): watch the reward",
        ),
        (
            MIXED | {"loss": None, "grad_norm": None, "samples_in_loss": 0, "groups_filtered": 8},
            "no loss at step 3: no sample is in the loss: 8 of 8 groups are left out",
        ),
        (MIXED | {"clip_fraction": 1.0}, "loss 0 at step 3: the clip stops the gradient of all tokens"),
        (
            MIXED | {"correction_dropped_fraction": 1.0, "clip_fraction": 0.0},
            "loss 0 at step 3: the off-policy correction drops all tokens",
        ),
        (
            MIXED,
            "loss 0 at step 3: there is no gradient either, though rewards differ: see clip_fraction and ratio_max",
        ),
        (
            {"step": 9, "loss": 1e-6, "loss_tokens": 40, "grad_norm": 1e-4},
            "loss 1e-06 at step 9: the rows of the step are fitted; where a held-out set's loss (-ed) is larger, they "
            "are memorised",
        ),
        (
            {"step": 9, "loss": 0.0, "loss_tokens": 0},
            "loss 0 at step 9: no token is in the loss: see which parts of a row are trained, and --max-length",
        ),
    ],
)
def test_a_loss_of_0_says_why(record, told):
    assert line(record) == told


@pytest.mark.parametrize(
    "record",
    [
        MIXED | {"loss": 0.02},
        MIXED | {"loss": -0.0001},
        EQUAL | {"update": 1, "constant_group_fraction": None},  # a batch's second update
        {"step": 1, "loss": None},
    ],
)
def test_another_loss_is_not_explained(record):
    assert line(record) is None


def test_each_cause_is_told_once():
    watch = ZeroLoss()
    told = [watch.line(record | {"step": step}) for step, record in enumerate([EQUAL, EQUAL, MIXED, EQUAL, MIXED])]
    assert [step for step, each in enumerate(told) if each] == [0, 2]
