"""Test that vLLM serves a trainer's adapters, merged into the weights or alone beside the base, version by version.

The oracle is transformers on weights that PEFT has merged, from the trainer's factors as they were sent.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from coati_rl.batching.packing import probe_micro_batch
from coati_rl.errors import TransferError
from coati_rl.model_files.adapter_files import AdapterSpec
from consumer.adapters.adapters import AdapterSource
from consumer.backend import Backend
from consumer.parallel.single_process import SingleProcess
from consumer.weight_sync.rank_sender import make_manifest
from tests.backends import backend_config
from tests.integration.engines.engine_process import hosted_engine
from tests.integration.engines.harness import MAX_MODEL_LEN, TIMEOUT_S, Harness, request

SPEC = AdapterSpec(rank=4, alpha=12.0, targets=("all-linear",))  # rank 8 is the least that vLLM allocates beyond 1
SOME = AdapterSpec(rank=9, alpha=3.0, targets=("down_proj", "q_proj", "up_proj"), is_rank_stabilised=True)
PROBE = tuple(2 + (7 * place) % 300 for place in range(150))  # more than one block of vLLM's prefix cache
PROMPTS = [tuple(range(40 + i, 60 + i)) for i in range(6)]
NUM_VERSIONS = 10
IN_FLIGHT = (3, 4, 6)  # versions


class AdapterHarness(Harness):
    """An engine and a trainer of adapters of its model; each version has another adapter."""

    def __init__(self, engine: Any, model_dir: Path, spec: AdapterSpec, *, is_merged: bool, num_ranks: int) -> None:
        super().__init__(engine, [model_dir], num_ranks=num_ranks)
        source = AdapterSource(spec=spec, base=str(model_dir), seed=1)
        config = backend_config(model_dir, adapters=source, sends_adapters=not is_merged)
        self.trainer = Backend(config, SingleProcess(device=torch.device("cpu")))
        self.model_dir, self.version = model_dir, -1
        self.bytes_sent = 0

    def train(self) -> None:
        """Another adapter, from its second version on."""
        if self.version >= 0:
            torch.manual_seed(self.version)
            for parameter in self.trainer.live_weights():
                parameter.data += 0.03 * torch.randn_like(parameter)

    def push(self, directory: Path | None = None, *, in_flight: bool = False) -> None:
        """Train, send and commit the next version; PEFT reads it from a checkpoint in `directory`, if that is given."""
        self.train()
        self.version += 1
        manifest = make_manifest(self.trainer, self.version)
        self.bytes_sent = manifest.total_bytes
        self.stage(manifest, self.trainer.export_weights())
        self.models.append(self.merged() if directory is None else self.saved(directory / f"step-{self.version}"))
        self.commit(self.version, len(self.models) - 1, in_flight=in_flight)

    def merged(self) -> Any:
        """Transformers' model with the trainer's adapters."""
        model = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32).eval()
        adapters, parameters = self.trainer.policy.adapters, self.trainer.policy.parameters
        with torch.no_grad():
            for name in adapters.layers:
                a, b = (parameters.full_weight(f"{name}.lora_{factor}.weight") for factor in "AB")
                model.get_submodule(name).weight += adapters.source.spec.scale * b @ a
        return model

    def saved(self, directory: Path) -> Any:
        """PEFT's reading of a checkpoint."""
        self.trainer.save(directory, state={"step": self.version})
        base = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32)
        return peft.PeftModel.from_pretrained(base, directory).eval()

    def trainer_gap(self) -> float:
        """The largest |engine - trainer| over the probe's tokens, in nats."""
        scores = self.trainer.score([probe_micro_batch(PROBE)])[0][0].numpy()
        return float(np.abs(scores - self.engine.probe(PROBE, timeout_s=TIMEOUT_S).logprobs).max())


KINDS = [
    pytest.param((True, SPEC, 1, "tied"), id="merged", marks=pytest.mark.full),  # for an engine weights as any
    pytest.param((False, SPEC, 1, "untied"), id="adapter"),
    pytest.param((False, SOME, 1, "tied"), id="some-layers", marks=pytest.mark.full),
    pytest.param((False, SPEC, 2, "tied"), id="two-ranks", marks=pytest.mark.full),
    pytest.param((False, SOME, 2, "untied"), id="some-layers-two-ranks", marks=pytest.mark.full),
]


@pytest.fixture(scope="module", params=KINDS)
def harness(request: pytest.FixtureRequest, checkpoints: Any) -> Iterator[AdapterHarness]:
    is_merged, spec, width, model = request.param
    settings = {"adapter": None if is_merged else spec, "tensor_parallel_size": width, "policy_version": -1}
    directory = checkpoints[model][0]
    with hosted_engine(
        "vllm", model=str(directory), max_model_len=MAX_MODEL_LEN, max_num_seqs=16, **settings
    ) as engine:
        harness = AdapterHarness(engine, directory, spec, is_merged=is_merged, num_ranks=width)
        harness.is_merged = is_merged
        yield harness
        harness.sender.close()


def test_before_the_first_adapter_there_is_nothing_to_sample_from_but_whole_weights_serve(harness):
    result = harness.generate(request("early", PROMPTS[0]))["early"]
    if harness.is_merged:
        assert set(result.completions[0].policy_versions.tolist()) == {-1}
    else:
        assert result.error.startswith("no adapter was received yet")


def test_ten_versions_are_served_as_the_trainer_and_peft_have_them(harness, tmp_path):
    gaps = []
    for number in range(NUM_VERSIONS):
        is_saved, in_flight = number in (1, 9), number in IN_FLIGHT
        prompts = {f"request {i}": prompt for i, prompt in enumerate(PROMPTS)} if in_flight else {}
        for name, prompt in prompts.items():
            harness.engine.submit(request(name, prompt, num_samples=2, max_new_tokens=60, temperature=0.8, seed=7))
        harness.push(tmp_path if is_saved else None, in_flight=in_flight)
        gaps += [harness.trainer_gap(), harness.probe_gap(PROBE)]
        (sample,) = harness.complete(PROBE, seed=number)  # its prompt is in the prefix cache of the version before
        assert set(sample.policy_versions.tolist()) == {harness.version}
        gaps.append(harness.logprob_gap(PROBE, sample, temperature=1.0))
        versions = set()
        for name, prompt in prompts.items():
            for one in harness.engine.result(name, TIMEOUT_S).completions:
                versions |= set(one.policy_versions.tolist())
                gaps += harness.logprob_gap_by_version(prompt, one, temperature=0.8).values()
        assert not prompts or versions == {harness.version - 1, harness.version}
    assert max(gaps) < 1e-4
    with torch.no_grad():
        first, last = (harness.models[place](torch.tensor([PROBE])).logits.log_softmax(-1) for place in (1, -1))
    assert float((first - last).abs().max()) > 1  # another policy by far


def test_an_engine_that_sleeps_keeps_its_base_and_gets_an_adapter(harness):
    for _ in range(2):
        harness.put_to_sleep()
        harness.push()
        (sample,) = harness.complete(PROBE, seed=3)
        assert set(sample.policy_versions.tolist()) == {harness.version}
        assert harness.logprob_gap(PROBE, sample, temperature=1.0) < 1e-4
        assert max(harness.trainer_gap(), harness.probe_gap(PROBE)) < 1e-4


def test_adapters_of_another_base_are_refused(harness, checkpoints):
    manifest = make_manifest(harness.trainer, harness.version + 1)
    other = type(manifest)(policy_version=manifest.policy_version, entries=manifest.entries, base="0" * 32)
    serves = "whole weights" if harness.is_merged else f"adapters of the base {manifest.base}"
    with pytest.raises(TransferError, match=f"adapters of the base 0{{32}}, and the engine serves {serves};"):
        harness.stage(other, harness.trainer.export_weights())
    assert harness.engine.version() == harness.version
