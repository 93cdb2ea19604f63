"""Test how a version of a policy's weights is named; directories are named in tests of `checkpoint`."""

import xxhash

from coati_rl.model_files.identity import weights_identity


def test_a_version_is_named_by_all_its_weights_or_by_base_and_adapters():
    assert weights_identity("", "d1") == "d1"
    assert weights_identity("b0", "d1") == xxhash.xxh3_128_hexdigest(b"b0 d1")
    assert len({weights_identity(base, digest) for base in ("b0", "b1") for digest in ("d0", "d1")}) == 4
