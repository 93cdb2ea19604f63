"""Test that fields which say where models lie reach the trainers (see test_flags.py)."""

from types import SimpleNamespace


def test_offload__reaches_the_training_engine_with_the_runs_directory(backend_of, config_with, tmp_path):
    everything = config_with(offload=("all",), kl_coeff=0.1, old_logprobs="trainer")
    assert backend_of(everything).offload == {"optimizer", "reference", "old"}
    found = backend_of(config_with(offload="optimizer"))
    assert (found.offload, found.offload_dir) == ({"optimizer"}, tmp_path)
    assert backend_of(config_with()).offload == frozenset()


def test_ref_devices__takes_the_reference_off_the_trainers(monkeypatch, backend_of, config_with):
    seen = []
    backend = SimpleNamespace(score_elsewhere=lambda roles, scorers: seen.append((roles, scorers.count)))
    config = config_with(ref_devices=2, kl_coeff=0.1)
    assert {*backend_of(config, backend).models} == {"policy"}
    assert seen == [({"reference"}, 2)]
    assert {*backend_of(config_with(kl_coeff=0.1)).models} == {"policy", "reference"}
