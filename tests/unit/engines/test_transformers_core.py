"""Test the core of the transformers engine step by step on one thread: seeds, versions, the cache."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from coati_rl.types import GenerationRequest, SamplingParams
from producer.engines import EngineOptions
from producer.engines.decoding import DecodingBatch, Row
from producer.engines.transformers_engine import _TransformersCore

PROMPT = (5, 6, 7, 8)


@pytest.fixture
def core(model_dir):
    core = _TransformersCore(EngineOptions(model=str(model_dir), max_model_len=64, max_num_seqs=8))
    core.load()
    return core


def add(core, *, num_samples=1, seed=0, temperature=1.0, max_new_tokens=12, prompt=PROMPT):
    sampling = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    request = GenerationRequest(
        request_id=f"{seed}", token_ids=prompt, num_samples=num_samples, sampling=sampling, min_policy_version=0
    )
    core.add(request, None)


def finish(core):
    """The samples of the one request that is under way."""
    while core.num_running():
        for result in core.step():
            return result.completions
    raise AssertionError("no request")


def test_sample_i_of_a_request_has_the_requests_seed_plus_i(core):
    add(core, num_samples=3, seed=5)
    samples = [sample.token_ids.tolist() for sample in finish(core)]
    assert len({*map(tuple, samples)}) == 3
    for index, sample in enumerate(samples):
        add(core, seed=5 + index)
        assert finish(core)[0].token_ids.tolist() == sample


def test_after_a_commit_running_samples_go_on_under_the_new_weights_alone(core, make_model_dir, monkeypatch):
    other = AutoModelForCausalLM.from_pretrained(make_model_dir(1), dtype=torch.float32)
    staged = SimpleNamespace(tensors=[(name, weight.detach()) for name, weight in other.named_parameters()], digest="d")
    monkeypatch.setattr(core._staging, "take", lambda: staged)
    add(core, num_samples=4, seed=3)
    for _ in range(3):
        core.step()
    core.commit(1)
    samples = finish(core)
    assert max(len(sample.token_ids) for sample in samples) == 12, "else no sample met the commit"
    for sample in samples:
        length = len(sample.token_ids)
        assert sample.policy_versions.tolist() == [0] * min(3, length) + [1] * max(0, length - 3)
        token_ids = torch.tensor([[*PROMPT, *sample.token_ids.tolist()]])
        with torch.no_grad():  # from the prompt on, as if nothing had been computed under the old weights
            logprobs = other(input_ids=token_ids[:, :-1]).logits[0, len(PROMPT) - 1 :].log_softmax(dim=-1)
        expected = logprobs.gather(-1, token_ids[0, len(PROMPT) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.logprobs[3:]), expected[3:], rtol=0, atol=1e-5)


def test_a_request_as_large_as_a_batch_has_the_same_bits_whatever_else_has_arrived(core):
    def bits(samples):
        return [(sample.token_ids.tolist(), sample.logprobs.tolist()) for sample in samples]

    add(core, num_samples=8, seed=20)
    alone = bits(finish(core))
    add(core, num_samples=3, seed=40, prompt=PROMPT * 5)
    add(core, num_samples=8, seed=20)  # any eight samples at a time would be five of these beside longer ones
    add(core, num_samples=5, seed=60)
    found = {}
    while core.num_running():
        found |= {result.request_id: bits(result.completions) for result in core.step()}
    assert found["20"] == alone
    assert found.keys() == {"20", "40", "60"}


def test_a_sample_that_took_the_models_last_position_ends_without_ending_the_others():
    config = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**config, eos_token_id=0)).eval()
    rows = [
        Row(
            request_id=f"{number}",
            index=0,
            prompt=(number + 1,) * length,
            sampling=SamplingParams(seed=number),
            max_tokens=16 - length,
            generator=torch.Generator().manual_seed(number),
        )
        for number, length in enumerate((14, 2, 2, 2, 2))
    ]
    batch = DecodingBatch(model, rows, eos_token_ids=frozenset(), decode=lambda token_ids: "")
    while not batch.is_done():
        batch.step(0)
    assert [len(row.token_ids) for row in rows] == [2, 14, 14, 14, 14]
    for row in rows:
        token_ids = torch.tensor([[*row.prompt, *row.token_ids]])
        with torch.no_grad():
            logprobs = model(input_ids=token_ids[:, :-1]).logits[0, len(row.prompt) - 1 :].log_softmax(dim=-1)
        expected = logprobs.gather(-1, token_ids[0, len(row.prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row.logprobs), expected, rtol=0, atol=1e-5)


def test_an_aborted_request_keeps_its_tokens_and_the_others_go_on_as_if_alone(core):
    add(core, num_samples=2, seed=3)
    alone = [sample.token_ids.tolist() for sample in finish(core)]
    add(core, num_samples=2, seed=3)
    add(core, num_samples=3, seed=100)
    add(core, num_samples=9, seed=70)  # has no place beside the others
    for _ in range(4):
        core.step()
    partial = [core.abort(name).completions for name in ("100", "70")]
    lengths = [[len(sample.token_ids) for sample in samples] for samples in partial]
    assert [{sample.finish_reason for sample in samples} for samples in partial] == [{"abort"}, {"abort"}]
    assert lengths == [[4] * 3, [0] * 9]
    assert core.abort("100") is None
    assert [sample.token_ids.tolist() for sample in finish(core)] == alone
    assert core.num_running() == 0
    add(core, num_samples=9, seed=70)  # more than are decoded at a time: one has no token yet
    for _ in range(4):
        core.step()
    assert [len(sample.token_ids) for sample in core.abort("70").completions] == [4] * 8 + [0]
    assert core.num_running() == 0


def test_what_is_aborted_right_after_a_commit_is_not_decoded_again(core, make_model_dir, monkeypatch):
    other = AutoModelForCausalLM.from_pretrained(make_model_dir(1), dtype=torch.float32)
    staged = SimpleNamespace(tensors=[(name, weight.detach()) for name, weight in other.named_parameters()], digest="d")
    monkeypatch.setattr(core._staging, "take", lambda: staged)
    add(core, num_samples=2, seed=3)
    add(core, num_samples=2, seed=100)
    for _ in range(2):
        core.step()
    core.commit(1)
    assert [len(sample.token_ids) for sample in core.abort("100").completions] == [2, 2]
    assert [sample.policy_versions[:3].tolist() for sample in finish(core)] == [[0, 0, 1]] * 2
