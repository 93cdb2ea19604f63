"""Test attention of a piece of a sample behind other tokens, in several blocks of queries, against all pairs."""

import pytest
import torch

from consumer.models import context_attention


@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
@pytest.mark.parametrize(("length", "past"), [(1, 0), (7, 0), (7, 1), (8, 20), (3, 20), (17, 5)])
def test_each_query_attends_to_the_keys_up_to_its_own_within_the_window(monkeypatch, window, length, past):
    monkeypatch.setattr(context_attention, "QUERY_BLOCK", 3)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, length, 8, generator=generator)
    key, value = (torch.randn(1, 2, past + length, 8, generator=generator) for _ in range(2))
    seen = past + length if window is None else min(past + length, length + window - 1)
    found = context_attention._attend_piece(
        query, key[:, :, past + length - seen :], value[:, :, past + length - seen :], window, 0.3, past + length + 2
    )
    distance = torch.arange(past, past + length)[:, None] - torch.arange(past + length)
    is_seen = (distance >= 0) & (distance < (window or past + length))
    keys, values = (each.repeat_interleave(2, dim=1) for each in (key, value))
    scores = (0.3 * query @ keys.transpose(2, 3)).masked_fill(~is_seen, -torch.inf)
    torch.testing.assert_close(found, scores.softmax(dim=-1) @ values, rtol=1e-5, atol=1e-6)
