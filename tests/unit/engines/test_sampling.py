"""Test sampling of tokens from logits against values computed by hand and by NumPy."""

import math

import numpy as np
import pytest
import torch

from coati_rl.types import SamplingParams
from producer.engines.sampling import draw, penalised, processed_logprobs

# Probabilities 0.5, 0.25, 0.125, 0.125.
LOGITS = torch.tensor([[math.log(4), math.log(2), 0.0, 0.0]])


def probabilities(**settings) -> list[float]:
    return processed_logprobs(LOGITS, [SamplingParams(**settings)]).exp()[0].tolist()


def test_temperature_divides_the_logits():
    # Squared at temperature 0.5: 16 : 4 : 1 : 1.
    assert probabilities(temperature=0.5) == pytest.approx([16 / 22, 4 / 22, 1 / 22, 1 / 22])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, 0.25, 0.125, 0.125]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0.0, 0.0]),
        ({"top_k": 3}, [0.5, 0.25, 0.125, 0.125]),  # the fourth ties with the third
        ({"top_k": 9}, [0.5, 0.25, 0.125, 0.125]),
        ({"top_p": 0.4}, [1.0, 0.0, 0.0, 0.0]),
        ({"top_p": 0.6}, [2 / 3, 1 / 3, 0.0, 0.0]),
        ({"top_k": 2, "top_p": 0.6}, [1.0, 0.0, 0.0, 0.0]),  # of the two, the first alone holds 2/3
        ({"min_p": 0.4}, [2 / 3, 1 / 3, 0.0, 0.0]),  # of the likeliest one's 0.5
        ({"min_p": 0.2}, [0.5, 0.25, 0.125, 0.125]),
        ({"min_p": 1.0}, [1.0, 0.0, 0.0, 0.0]),
        ({"temperature": 0.5, "min_p": 0.4}, [1.0, 0.0, 0.0, 0.0]),  # 16 : 4 : 1 : 1
        ({"min_p": 0.4, "top_p": 0.6}, [1.0, 0.0, 0.0, 0.0]),  # of the two that are left, the first alone holds 2/3
        ({"temperature": 0.0, "top_k": 1, "top_p": 0.1, "min_p": 1.0}, [0.5, 0.25, 0.125, 0.125]),
    ],
)
def test_min_p_top_k_and_top_p_cut_in_turn_and_renormalise(settings, expected):
    assert probabilities(**settings) == pytest.approx(expected)


def test_rows_with_different_settings_do_not_touch_each_other():
    rows = [SamplingParams(), SamplingParams(top_k=1), SamplingParams(temperature=0.5, top_p=0.9)]
    rows.append(SamplingParams(min_p=0.4))
    together = processed_logprobs(LOGITS.repeat(4, 1), rows)
    for row, settings in zip(together, rows, strict=True):
        torch.testing.assert_close(row, processed_logprobs(LOGITS, [settings])[0])


def test_a_penalty_divides_positive_logits_of_what_came_before_and_multiplies_negative_ones():
    logits = torch.tensor([[4.0, -4.0, 2.0, -2.0]] * 2)
    rows = [SamplingParams(), SamplingParams(repetition_penalty=2.0)]
    assert penalised(logits, rows, [(0, 1), (1, 0, 0)]).tolist() == [[4.0, -4.0, 2.0, -2.0], [2.0, -8.0, 2.0, -2.0]]
    assert logits[1].tolist() == [4.0, -4.0, 2.0, -2.0], "the model's are not changed"
    assert penalised(logits, rows[:1] * 2, []) is logits, "contexts are not read without a penalty"


def test_a_draw_is_the_inverse_of_the_cumulative_distribution():
    logprobs = processed_logprobs(LOGITS, [SamplingParams()])
    for uniform, token in [(0.0, 0), (0.49, 0), (0.51, 1), (0.74, 1), (0.76, 2), (0.9, 3), (1 - 2**-53, 3)]:
        assert draw(logprobs, [SamplingParams()], [uniform]).tolist() == [token]


def test_a_token_that_was_cut_off_is_never_drawn():
    settings = [SamplingParams(top_k=2)]
    logprobs = processed_logprobs(LOGITS, settings)
    for uniform in np.linspace(0.0, 1.0 - 2**-53, 101):
        assert draw(logprobs, settings, [float(uniform)]).item() in (0, 1)


def test_greedy_rows_take_the_most_likely_token_whatever_was_drawn():
    assert draw(LOGITS.log_softmax(-1), [SamplingParams(temperature=0.0)], [0.99]).tolist() == [0]


def test_frequencies_follow_the_distribution():
    random = np.random.default_rng(0)
    number = 4000
    settings = [SamplingParams()] * number
    logprobs = processed_logprobs(LOGITS.repeat(number, 1), settings)
    tokens = draw(logprobs, settings, random.random(number).tolist())
    counts = np.bincount(tokens.numpy(), minlength=4) / number
    np.testing.assert_allclose(counts, [0.5, 0.25, 0.125, 0.125], atol=0.03)
