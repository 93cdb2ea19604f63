"""Test that samples packed into a row get the same hidden states and log-probabilities as alone."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from bench.mfu import SHAPES, make_backend, make_samples
from torch import Tensor

from coati_rl.batch import MicroBatch
from coati_rl.batching.packing import pack
from consumer.backend import Backend
from consumer.models import packed_attention, policy_model
from tests.gpu.devices import on_cpu_and_gpu, size_on
from tests.unit.consumer.test_packed_attention import (
    LENGTHS,
    MODELS,
    PATHS,
    TREE_LENGTHS,
    TREE_PARENTS,
    TREE_POSITIONS,
    alone,
)

# Short, as attention to thousands of random tokens has a mean that hardly depends on whose they are.
COMPARED_LENGTHS = (96, 64, 48, 33)
# Mean |difference| in nats of a token's log-probability in bfloat16. With four layers of the 0.5B shape, on a CPU,
# bfloat16 alone makes 0.005 of float32's; samples that see each other make 0.4.
TOLERANCE = 0.05


def scores(backend: Backend, micro_batches: Sequence[MicroBatch]) -> dict[int, Tensor]:
    """Index of a sample -> float32[T'] of its counted tokens."""
    return {
        int(index): score.cpu()[torch.from_numpy(batch.loss_arrays["sample_index"] == index)]
        for batch, score in zip(micro_batches, backend.score(micro_batches), strict=True)
        for index in np.unique(batch.loss_arrays["sample_index"])
        if index >= 0
    }


@on_cpu_and_gpu
def test_packed_log_probabilities_are_those_of_each_sample_alone(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"cpu": "tiny", "cuda": "qwen2-0.5b"}[size_on(device)]
    backend = make_backend(shape, torch.device(device))
    samples = make_samples(COMPARED_LENGTHS, SHAPES[shape][0])
    together = pack(samples, max_samples=len(samples))[0]
    assert len(together) == 1
    packed = scores(backend, together)
    monkeypatch.setattr(policy_model, "row_lengths", lambda segments, shape: None)
    mixed = scores(backend, together)  # each sees those before it
    backend.policy.module.set_attn_implementation("sdpa")
    separate = scores(backend, pack(samples, max_samples=1)[0])

    def difference(found: dict[int, Tensor]) -> float:
        return float(torch.cat([(found[i] - separate[i]).abs() for i in range(len(samples))]).mean())

    assert difference(packed) < TOLERANCE < difference(mixed)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_flash_attentions_varlen_kernel_agrees_with_samples_alone(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval().to("cuda", torch.bfloat16)
    token_ids = torch.randint(0, 40, (2, 15), device="cuda")
    position_ids = torch.tensor([[t for n in row for t in range(n)] for row in LENGTHS], device="cuda")
    packed = model.base_model(
        input_ids=token_ids, position_ids=position_ids, use_cache=False, lengths=LENGTHS
    ).last_hidden_state
    torch.testing.assert_close(packed, alone(model, token_ids), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)  # the varlen kernel; SDPA with masks
@pytest.mark.parametrize("name", MODELS)
def test_sequences_that_share_a_prefix_agree_with_each_alone(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval().to("cuda", dtype)
    token_ids, direction = torch.randint(0, 40, (1, 42), device="cuda"), torch.randn(42, 32, device="cuda")
    shared = model.base_model(
        input_ids=token_ids,
        position_ids=torch.tensor([TREE_POSITIONS], device="cuda"),
        use_cache=False,
        lengths=TREE_LENGTHS,
        parents=TREE_PARENTS,
    ).last_hidden_state[0]
    (shared * direction)[:40].sum().backward()
    gradients = torch.cat([p.grad.flatten().float() for p in model.base_model.parameters()])
    model.zero_grad()
    model.set_attn_implementation("eager")
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-4}[dtype]
    own, seen = torch.zeros((), device="cuda"), set[int]()
    for path in PATHS:
        hidden = model.base_model(input_ids=token_ids[:, path], use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(shared[path], hidden, rtol=tolerance, atol=tolerance)
        new = [index for index, place in enumerate(path) if place not in seen]
        own = own + (hidden[new] * direction[[path[index] for index in new]]).sum()
        seen |= set(path)
    own.backward()
    right = torch.cat([p.grad.flatten().float() for p in model.base_model.parameters()])
    assert (gradients - right).norm() < tolerance * right.norm()


def test_the_varlen_kernel_gets_the_keys_of_each_path_with_boundaries_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Tensor | int] = []

    def attend(*tensors_and_lengths: Tensor | int, **_: object) -> Tensor:
        asked.extend(tensors_and_lengths)
        return tensors_and_lengths[0]

    monkeypatch.setattr(packed_attention, "varlen_attn", attend)
    places = torch.arange(42.0)[None, None, :, None]  # rows, heads, tokens, size of a head
    packed_attention._attend_varlen(places, places, places, TREE_LENGTHS, TREE_PARENTS, None, 0.5)
    _, keys, _, boundaries, key_boundaries, longest, longest_key = asked
    prompt = [*range(6)]
    paths = [
        prompt, [*prompt, 6], [*prompt, 7, 8], [*prompt, 7, 8, 9, 10], [*prompt, *range(11, 36)],
        [*range(36, 40)], [40, 41],
    ]  # fmt: skip
    assert keys.flatten().tolist() == [place for path in paths for place in path]
    assert boundaries.tolist() == [0, 6, 7, 9, 11, 36, 40, 42]
    assert key_boundaries.tolist() == [0, 6, 13, 21, 31, 62, 66, 68]
    assert (longest, longest_key) == (25, 31)


@pytest.mark.parametrize("shares_unasked", [False, True])  # PyTorch 2.11's does, and has no `enable_gqa`
def test_the_varlen_kernel_is_asked_for_what_it_takes(monkeypatch: pytest.MonkeyPatch, shares_unasked: bool) -> None:
    asked = {}

    def attend(query: Tensor, *_: object, **keywords: object) -> Tensor:
        asked.update(keywords)
        return query

    monkeypatch.setattr(packed_attention, "varlen_attn", attend)
    if shares_unasked:
        monkeypatch.setattr(packed_attention, "SHARED_HEADS", {})
    query = torch.randn(2, 4, 15, 8)  # rows, heads, tokens, size of a head
    attended = packed_attention._attend_varlen(query, query[:, :2], query[:, :2], LENGTHS, None, 4, 0.5)
    torch.testing.assert_close(attended, query.transpose(1, 2))
    assert asked == {"scale": 0.5, "window_size": (3, 0)} | ({} if shares_unasked else {"enable_gqa": True})
