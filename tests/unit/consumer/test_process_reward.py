"""Test the process reward objective on literal steps: how they are asked for, value, gradient, split and metrics."""

import math

import pytest
import torch

from coati_rl.batch import MicroBatch
from coati_rl.batching.packing import blank_micro_batch, pack
from coati_rl.reading.reward_samples import process_sample
from consumer.objectives.process_reward import ProcessReward

MARK, RIGHT, WRONG = 9, 7, 8
OBJECTIVE = ProcessReward(label_token_ids=(RIGHT, WRONG))


def expanded(*labels: list[float], per_row: bool = False) -> MicroBatch:
    samples = [process_sample("x", [1, MARK] * len(each), each, places=range(1, 2 * len(each), 2)) for each in labels]
    micro_batches = pack(samples, max_samples=len(samples), one_sample_per_row=per_row)[0]
    ((changed,), sums) = OBJECTIVE.targets(micro_batches)
    assert sums == {}
    return changed


def evaluate(
    micro_batch: MicroBatch, logprobs: list[list[float]], objective: ProcessReward = OBJECTIVE
) -> tuple[float, dict[str, float], list[list[float]]]:
    arrays = {name: torch.tensor(array) for name, array in micro_batch.loss_arrays.items()}
    leaf = torch.tensor(logprobs, requires_grad=True)
    loss, sums = objective.losses["policy"](leaf, torch.zeros_like(leaf), arrays)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.item(), {name: value.item() for name, value in sums.items()}, gradient.tolist()


def test_each_step_asks_for_both_label_tokens_at_its_placeholder() -> None:
    arrays = expanded([1.0, 0.25]).loss_arrays
    assert arrays["token_ids"].tolist() == [[RIGHT, WRONG, RIGHT, WRONG]]
    assert arrays["sources"].tolist() == [[1, 1, 3, 3]]
    assert arrays["target"].tolist() == [[1.0, 0.0, 0.25, 0.75]]


def test_value_and_metrics_of_two_steps_restricted_to_the_labels_and_over_the_vocabulary() -> None:
    logprobs = [[math.log(0.3), math.log(0.1), math.log(0.2), math.log(0.2)]]
    batch = expanded([1.0, 0.25])
    loss, sums, gradient = evaluate(batch, logprobs)
    assert loss == pytest.approx(-math.log(0.75) + math.log(2))
    assert gradient[0] == pytest.approx([0.75 - 1, 0.25, 0.5 - 0.25, 0.5 - 0.75])
    metrics = OBJECTIVE.metrics(sums, loss_scale=1 / 2)
    assert metrics == {"loss": pytest.approx(loss / 2), "step_accuracy": 0.5, "labelled_steps": 2}

    whole = ProcessReward(label_token_ids=(RIGHT, WRONG), is_restricted=False)
    loss, _, gradient = evaluate(batch, logprobs, whole)
    assert loss == pytest.approx(-math.log(0.3) - 0.25 * math.log(0.2) - 0.75 * math.log(0.2))
    assert gradient == [[-1.0, 0.0, -0.25, -0.75]]


def test_padding_neither_counts_nor_spoils_the_gradient_and_rows_add_up() -> None:
    packed = evaluate(expanded([1.0, 0.25], [0.0]), [[-1.0, -2.0, -3.0, -1.0, -0.5, -2.0]])
    rows = [[-1.0, -2.0, -3.0, -1.0], [-0.5, -2.0, math.nan, -math.inf]]
    loss, sums, gradient = evaluate(expanded([1.0, 0.25], [0.0], per_row=True), rows)
    assert (loss, sums) == (pytest.approx(packed[0]), packed[1] | {"loss_sum": pytest.approx(packed[0])})
    assert gradient[1][2:] == [0.0, 0.0]
    assert [*gradient[0], *gradient[1][:2]] == pytest.approx(packed[2][0])


def test_a_blank_micro_batch_has_no_steps_and_a_zero_gradient() -> None:
    ((blank,), _) = OBJECTIVE.targets((blank_micro_batch(),))
    for micro_batch in (blank, blank_micro_batch()):  # made before or after the targets
        shape = micro_batch.loss_arrays["token_ids"].shape
        loss, sums, gradient = evaluate(micro_batch, torch.zeros(shape).tolist())
        assert loss == 0 == sums["num_steps"]
        assert gradient == torch.zeros(shape).tolist()
    assert OBJECTIVE.metrics(sums, loss_scale=0.0) == {"loss": None, "step_accuracy": None, "labelled_steps": 0}
