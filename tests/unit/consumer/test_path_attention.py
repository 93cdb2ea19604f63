"""Test attention of the last tokens of a path, and its gradients, against all pairs and torch's autograd."""

import pytest
import torch

from consumer.models import path_attention
from consumer.models.path_attention import ForBackward, Settings, add_path_gradients, attend_path
from tests.cases import one_of

LENGTHS = [(1, 0), (7, 0), (7, 1), (8, 20), (3, 20), (17, 5)]  # of queries, and of keys before them


@pytest.mark.parametrize(("lengths", "window", "has_flash"), one_of(3, LENGTHS, [None, 1, 4, 9, 100], [True, False]))
def test_each_query_attends_to_the_keys_up_to_its_own_within_the_window(monkeypatch, lengths, window, has_flash):
    length, past = lengths
    monkeypatch.setattr(path_attention, "QUERY_BLOCK", 3)
    monkeypatch.setattr(path_attention, "has_flash", lambda _: has_flash)
    generator = torch.Generator().manual_seed(0)
    query, gradient = (torch.randn(1, 4, length, 8, generator=generator) for _ in range(2))
    key, value = (torch.randn(1, 2, past + length, 8, generator=generator) for _ in range(2))
    leaves = [each.requires_grad_() for each in (query, key, value)]

    distance = torch.arange(past, past + length)[:, None] - torch.arange(past + length)
    is_seen = (distance >= 0) & (distance < (window or past + length))
    keys, values = (each.repeat_interleave(2, dim=1) for each in (key, value))
    scores = (0.3 * query @ keys.transpose(2, 3)).masked_fill(~is_seen, -torch.inf)
    expected = scores.softmax(dim=-1) @ values
    expected_gradients = torch.autograd.grad(expected, leaves, gradient)

    seen = past + length if window is None else min(past + length, length + window - 1)
    given = [query.detach(), *(each.detach()[:, :, past + length - seen :] for each in (key, value))]
    settings = Settings(window, 0.3, past + length + 2)
    attended, log_sums = attend_path(*given, settings)
    torch.testing.assert_close(attended, expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(log_sums, scores.logsumexp(dim=-1).detach(), rtol=1e-5, atol=1e-6)
    found = [torch.ones_like(each) for each in leaves]  # what others have added before
    into = (found[0], *(each[:, :, past + length - seen :] for each in found[1:]))
    add_path_gradients(ForBackward(gradient, attended, log_sums, *given), settings, into=into)
    for each, right in zip(found, expected_gradients, strict=True):
        torch.testing.assert_close(each - 1, right, rtol=1e-5, atol=1e-5)
