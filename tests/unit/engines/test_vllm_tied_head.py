"""Test when a vLLM worker copies updated embeddings into its LM head, without vLLM."""

from types import SimpleNamespace

import pytest
import torch

from producer.engines.vllm_worker import _repack_tied_head

UPDATE = ["model.embed_tokens.weight", "model.norm.weight"]


@pytest.mark.parametrize(("device", "updated", "is_copied"), [
    ("cpu", UPDATE, True),
    ("cpu", [*UPDATE, "lm_head.weight"], False),  # another head than the embedding
    ("cuda", UPDATE, False),  # one tensor
])  # fmt: skip
def test_a_head_that_an_update_does_not_hold_is_the_embedding(device, updated, is_copied) -> None:
    packed = []
    embeddings = SimpleNamespace(weight="new embeddings")
    method = SimpleNamespace(process_weights_after_loading=lambda head: packed.append(head.weight))
    head = SimpleNamespace(weight="old head", quant_method=method)
    model = SimpleNamespace(lm_head=head, model=SimpleNamespace(embed_tokens=embeddings))
    _repack_tied_head(model, updated, torch.device(device))
    assert packed == (["new embeddings"] if is_copied else [])
