"""Test what a trainer of adapters sends: whole weights with the adapters in them, or the adapters alone."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from coati_rl.model_files.adapter_files import AdapterSpec
from coati_rl.model_files.identity import model_identity
from coati_rl.transport.manifest import WeightManifest
from consumer.adapters.adapters import AdapterSource
from consumer.backend import Backend
from consumer.parallel.single_process import SingleProcess
from consumer.weight_sync.rank_sender import make_manifest
from producer.engines.checkpoint import check_manifest, expect_update
from tests.backends import backend_config

SPEC = AdapterSpec(rank=2, alpha=6.0, targets=("all-linear",))


def make_backend(model_dir: Path, **settings: object) -> Backend:
    source = AdapterSource(spec=SPEC, base=str(model_dir))
    backend = Backend(backend_config(model_dir, adapters=source, **settings), SingleProcess(device=torch.device("cpu")))
    for parameter in backend.live_weights():
        parameter.data += 0.5
    return backend


def sent(backend: Backend) -> tuple[WeightManifest, dict[str, torch.Tensor]]:
    manifest, tensors = make_manifest(backend, 3), dict(backend.export_weights())
    assert [(e.name, e.shape) for e in manifest.entries] == [(name, tuple(t.shape)) for name, t in tensors.items()]
    assert {e.dtype for e in manifest.entries} == {str(t.dtype).removeprefix("torch.") for t in tensors.values()}
    return manifest, tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_alone_are_what_a_checkpoint_holds_and_an_engine_expects(model_dir, tmp_path, dtype):
    backend = make_backend(model_dir, sends_adapters=True, wire_dtype=dtype)
    manifest, tensors = sent(backend)
    backend.save(tmp_path / "step-1", state={"step": 1})
    saved = load_file(tmp_path / "step-1" / "adapter_model.safetensors")
    assert tensors.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name].to(dtype)) for name, tensor in tensors.items())
    assert manifest.base == model_identity(model_dir)
    name = str(dtype).removeprefix("torch.")
    expected = expect_update(model_dir, name, SPEC)
    assert expected.check(manifest) is None
    with pytest.raises(Exception, match="engine serves whole weights; give both the same --model and --lora-sync"):
        check_manifest(manifest, expected.entries, dtype=name)


def test_merged_weights_have_no_base_and_are_base_and_adapters(model_dir):
    whole, alone = make_backend(model_dir), make_backend(model_dir, sends_adapters=True)
    manifest, merged = sent(whole)
    assert manifest.base == ""
    assert expect_update(model_dir, "float32", None).check(manifest) is None
    base, factors = load_file(model_dir / "model.safetensors"), sent(alone)[1]
    layers = {name.partition(".lora_")[0] for name in factors}
    assert len(layers) == len(factors) / 2
    for name, weight in merged.items():
        prefix = "base_model.model." + name.removesuffix(".weight")
        right = base[name].float()
        if prefix in layers:
            right = right + 3.0 * factors[f"{prefix}.lora_B.weight"] @ factors[f"{prefix}.lora_A.weight"]
        torch.testing.assert_close(weight, right, rtol=1e-6, atol=1e-6)
    assert make_manifest(alone, 0).total_bytes < manifest.total_bytes
