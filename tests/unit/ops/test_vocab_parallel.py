"""Test an LM head divided over two processes against the same head in one."""

import multiprocessing

import pytest
import torch
from torch import Tensor

from tests.unit.ops.lm_head import make_inputs, make_micro_batch, relative_error
from tests.unit.ops.token_loss import TokenLoss
from tests.unit.ops.vocab_rank import PATHS, compute, run_rank

NUM_RANKS = 2
VOCABULARY = 14  # 7 rows per rank; the ids of the 7 tokens lie on both

CASES = {
    "one chunk": {"dtype": torch.float32, "chunk_elements": 100 * VOCABULARY},
    "chunks of 3": {"dtype": torch.float32, "chunk_elements": 3 * VOCABULARY},
    "bfloat16": {"dtype": torch.bfloat16, "chunk_elements": 3 * VOCABULARY},
    "no entropy": {"dtype": torch.float32, "chunk_elements": 3 * VOCABULARY, "loss_fn": TokenLoss(entropy_coeff=0.0)},
    "no token": {"dtype": torch.float32, "chunk_elements": VOCABULARY},
}

Results = dict[str, dict[str, Tensor]]  # path to name to value


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Results, list[Results]]]:
    """Case to (what one process computes, what each of two does)."""
    directory = tmp_path_factory.mktemp("ranks")
    inputs = make_inputs(bias=True, vocabulary=VOCABULARY)
    tensors = make_micro_batch(inputs)
    targets = tensors["token_ids"][tensors["loss_mask"]]
    assert targets.min() < VOCABULARY // NUM_RANKS <= targets.max()
    head = {name: inputs[name] for name in ("hidden", "weight", "bias")}
    its = make_inputs(seed=1, bias=True, vocabulary=VOCABULARY)
    head |= {f"teacher_{name}": its[name] for name in ("hidden", "weight", "bias")}
    cases = [{**head, "tensors": tensors, "loss_fn": TokenLoss(), **case} for case in CASES.values()]
    cases[-1]["tensors"] = tensors | {"loss_mask": torch.zeros_like(tensors["loss_mask"])}
    forked = multiprocessing.get_context("fork")  # importing torch takes each of them seconds
    ranks = [forked.Process(target=run_rank, args=(rank, NUM_RANKS, directory, cases)) for rank in range(NUM_RANKS)]
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(120)
        assert [rank.exitcode for rank in ranks] == [0] * NUM_RANKS
    finally:
        for rank in ranks:
            rank.kill()
    of_ranks = [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(NUM_RANKS)]
    alone = [compute(case, None, chunk_elements=case["chunk_elements"]) for case in cases]
    return {name: (alone[i], [results[i] for results in of_ranks]) for i, name in enumerate(CASES)}


def whole(ranks: list[Results], path: str, name: str) -> Tensor:
    """A value as one process would have it: shares of the head one below the other, all else from rank 0."""
    if name in ("grad_weight", "grad_bias"):
        return torch.cat([results[path][name] for results in ranks])
    return ranks[0][path][name]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", ["one chunk", "chunks of 3", "no entropy"])
def test_values_and_gradients_of_two_ranks_are_those_of_one_process(shared: dict, case: str, path: str) -> None:
    alone, ranks = shared[case]
    assert alone[path].keys() == ranks[0][path].keys()
    for name, expected in alone[path].items():
        torch.testing.assert_close(whole(ranks, path, name), expected, rtol=5e-6, atol=2e-6, msg=f"{path} {name}")
    assert alone[path]["grad_hidden"].any()


@pytest.mark.parametrize("path", PATHS)
def test_bfloat16_gradients_of_two_ranks_are_near_those_of_one_process(shared: dict, path: str) -> None:
    alone, ranks = shared["bfloat16"]
    for name in ("grad_hidden", "grad_weight", "grad_bias"):
        assert whole(ranks, path, name).dtype == torch.bfloat16
        assert relative_error(whole(ranks, path, name), alone[path][name]) < 2e-2, name


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES)
def test_ranks_agree_to_the_bit_on_all_that_they_do_not_share(shared: dict, case: str, path: str) -> None:
    _, (first, second) = shared[case]
    names = first[path].keys() - {"grad_weight", "grad_bias"}
    assert {"loss", "grad_hidden"} <= names
    for name in names:
        assert torch.equal(first[path][name], second[path][name]), name


@pytest.mark.parametrize("path", PATHS)
def test_without_a_token_gradients_of_two_ranks_are_zeros(shared: dict, path: str) -> None:
    _, ranks = shared["no token"]
    assert not any(whole(ranks, path, name).any() for name in ("loss", "grad_hidden", "grad_weight", "grad_bias"))
