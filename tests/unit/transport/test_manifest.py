"""Test the manifest: its entries, buckets and refusals."""

import json
from dataclasses import replace

import pytest
import torch

from coati_rl.errors import TransferError
from coati_rl.transport.manifest import TensorEntry, WeightManifest, build_manifest


def entry(name: str, *shape: int, dtype: str = "float32", sender: int = 0) -> TensorEntry:
    return TensorEntry(name=name, dtype=dtype, shape=shape, sender=sender)


def manifest(*entries: TensorEntry, bucket_bytes: int = 64) -> WeightManifest:
    return WeightManifest(policy_version=7, entries=entries, bucket_bytes=bucket_bytes)


def test_json_and_back_is_the_same_manifest():
    original = manifest(entry("a", 2, 3), entry("b", dtype="bfloat16"), entry("ü", 5, dtype="float16", sender=2))
    assert WeightManifest.from_json(original.to_json()) == original
    of_adapters = replace(original, base="b0")
    assert WeightManifest.from_json(of_adapters.to_json()) == of_adapters
    assert "\n" not in original.to_json()


def test_it_is_built_from_tensors_even_without_data():
    tensors = [("a", torch.empty(2, 3, device="meta")), ("b", torch.tensor(1.0, dtype=torch.bfloat16))]
    built = build_manifest(tensors, policy_version=7)
    assert built.entries == (entry("a", 2, 3), entry("b", dtype="bfloat16"))
    assert built.total_bytes == 2 * 3 * 4 + 2


def test_tensors_are_packed_in_order_at_multiples_of_16_bytes():
    # 12 -> 16, 20 -> 32, 16 -> 16 bytes: 64 in all, which is the bucket; the next one starts another.
    plan = manifest(entry("a", 3), entry("b", 5), entry("c", 4), entry("d", 1)).buckets()
    assert [[(item.entry.name, item.offset) for item in bucket.items] for bucket in plan] == [
        [("a", 0), ("b", 16), ("c", 48)],
        [("d", 0)],
    ]
    assert [bucket.num_bytes for bucket in plan] == [64, 16]


def test_a_tensor_larger_than_a_bucket_is_cut_into_buckets_of_its_own():
    # 180 bytes in parts of 64, the last of 52 with 12 of padding
    plan = manifest(entry("small", 1), entry("large", 45), entry("after", 1), bucket_bytes=79).buckets()
    assert [[(i.entry.name, i.begin, i.num_bytes) for i in bucket.items] for bucket in plan] == [
        [("small", 0, 4)],
        *([("large", begin, size)] for begin, size in ((0, 64), (64, 64), (128, 52))),
        [("after", 0, 4)],
    ]
    assert [bucket.num_bytes for bucket in plan] == [16, 64, 64, 64, 16]


def test_tensors_are_views_of_buckets_that_lie_one_after_the_other():
    announced = manifest(entry("small", 1), entry("large", 15, 3), entry("half", 2, dtype="bfloat16"))
    assert announced.num_staged_bytes == 16 + 3 * 64 + 16
    memory = torch.zeros(announced.num_staged_bytes, dtype=torch.uint8)
    memory[16 : 16 + 180] = torch.arange(45.0).view(torch.uint8)
    found = dict(announced.tensors(memory))
    assert [*found] == ["small", "large", "half"]
    assert torch.equal(found["large"], torch.arange(45.0).view(15, 3))
    assert (found["half"].dtype, found["half"].shape) == (torch.bfloat16, (2,))
    found["half"].fill_(1)
    assert memory[16 + 192 :].tolist() == [128, 63] * 2 + [0] * 12


def test_a_bucket_ends_where_the_sender_changes_however_often_it_does():
    senders = manifest(
        entry("a", 1),
        entry("b", 1),
        entry("c", 1, sender=1),
        entry("d", 1),
        entry("e", 1, sender=2),
        bucket_bytes=2**20,
    )
    plan = senders.buckets()
    assert [[item.entry.name for item in bucket.items] for bucket in plan] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert [bucket.sender for bucket in plan] == [0, 1, 0, 2]
    assert [bucket.num_bytes for bucket in plan] == [32, 16, 16, 16]
    assert senders.num_senders == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy_version": -1}, "policy_version -1"),
        ({"policy_version": True}, "policy_version is True"),
        ({"policy_version": "7"}, "'7'"),
        ({"bucket_bytes": 8}, "bucket_bytes 8"),
        ({"entries": []}, "no tensors"),
        ({"entries": [["a", "float32", [1], 0], ["a", "float32", [1], 0]]}, "'a' is listed twice"),
        ({"entries": [["a", "int64", [1], 0]]}, "'int64'"),
        ({"entries": [["a", "float32", [0], 0]]}, r"\(0,\)"),
        ({"entries": [["a", "float32", [-1], 0]]}, r"\(-1,\)"),
        ({"entries": [["a", "float32", [1.0], 0]]}, "1.0"),
        ({"entries": [["", "float32", [1], 0]]}, "no name"),
        ({"entries": [["a", "float32", [1]]]}, "expected"),
        ({"entries": [["a", "float32", [1], -1]]}, "sender -1"),
        ({"entries": [["a", "float32", [1], True]]}, "True"),
        ({"entries": [["a", "float32", [1], "0"]]}, "expected"),
        ({"base": None}, "base is None"),
        ({"surplus": 1}, "surplus"),
    ],
)
def test_a_malformed_manifest_is_refused_with_the_reason(change, message):
    fields = {"policy_version": 7, "bucket_bytes": 64, "base": "", "entries": [["a", "float32", [1], 0]]}
    assert WeightManifest.from_json(json.dumps(fields)).entries == (entry("a", 1),)
    with pytest.raises(TransferError, match=message):
        WeightManifest.from_json(json.dumps(fields | change))


@pytest.mark.parametrize("text", ["", "[]", "null", "{"])
def test_what_is_not_a_json_object_is_refused(text):
    with pytest.raises(TransferError, match="manifest"):
        WeightManifest.from_json(text)
