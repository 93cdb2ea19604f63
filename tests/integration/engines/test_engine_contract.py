"""Test the contract of a GenerationEngine, on which rollout loop and trainer rely, with every backend."""

import numpy as np
import pytest
import torch

from coati_rl.errors import EngineError, TransferError
from coati_rl.transport.manifest import WeightManifest, build_manifest
from coati_rl.types import Completion
from tests.integration.engines.harness import MAX_MODEL_LEN, TIMEOUT_S, log_softmax_of, request

EOS = 0
PROMPT = tuple(range(40, 60))
LONG_PROMPT = tuple(2 + (7 * place) % 300 for place in range(200))  # more than one block of vLLM's prefix cache


def tokens(completions: tuple[Completion, ...]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


# ---- sampling ----


@pytest.mark.usefixtures("seeds_and_cuts")
def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(harness):
    alone = harness.complete(PROMPT, num_samples=3, seed=11)
    others = [request(f"other {i}", range(2 + i, 9 + 3 * i), num_samples=2, seed=100 * i) for i in range(6)]
    crowd = harness.generate(*others[:3], request("again", PROMPT, num_samples=3, seed=11), *others[3:])
    assert tokens(crowd["again"].completions) == tokens(alone)


@pytest.mark.usefixtures("seeds_and_cuts")
def test_sample_i_uses_the_seed_plus_i(harness):
    group = harness.complete(PROMPT, num_samples=3, seed=20)
    single = [harness.complete(PROMPT, seed=20 + i)[0] for i in range(3)]
    assert tokens(group) == tokens(tuple(single))


def test_different_seeds_give_different_tokens(harness):
    group = harness.complete(PROMPT, num_samples=4, seed=1)
    assert len({tuple(sample) for sample in tokens(group)}) == 4


def test_the_largest_seeds_are_accepted(harness):
    assert len(harness.complete(PROMPT, num_samples=2, seed=2**62)) == 2


def test_temperature_zero_is_greedy_in_every_sample(harness):
    samples = harness.complete(PROMPT, num_samples=3, temperature=0.0, seed=5)
    assert len(samples) == 3
    assert tokens(samples)[0] == tokens(samples)[1] == tokens(samples)[2]
    if harness.has_model:
        assert tokens(samples)[0] == harness.logits(PROMPT, samples[0]).argmax(-1).tolist()


# ---- how a response ends ----


def test_a_response_ends_with_eos_or_at_the_limit_and_says_which(harness):
    samples = [
        sample
        for i in range(4)
        for sample in harness.complete(range(10 + i, 20 + i), num_samples=8, max_new_tokens=60, seed=1000 * i)
    ]
    for sample in samples:
        ids = sample.token_ids.tolist()
        assert EOS not in ids[:-1]
        assert sample.finish_reason == ("stop" if ids[-1] == EOS else "length")
        assert len(ids) == 60 or ids[-1] == EOS
        assert "<|endoftext|>" not in sample.text
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}


def test_the_context_length_ends_a_response_too(harness):
    prompt = LONG_PROMPT + PROMPT + PROMPT
    samples = harness.complete(prompt, num_samples=8, max_new_tokens=500, seed=3)
    lengths = {len(sample.token_ids) for sample in samples if sample.finish_reason == "length"}
    assert lengths == {MAX_MODEL_LEN - len(prompt)}


@pytest.mark.usefixtures("seeds_and_cuts")
def test_a_stop_string_ends_the_text_and_its_tokens_are_kept(harness):
    free = harness.complete(PROMPT, num_samples=8, max_new_tokens=60, seed=40)
    stopped = harness.complete(PROMPT, num_samples=8, max_new_tokens=60, seed=40, stop=("d", "zzz"))
    assert any("d" in sample.text for sample in free)
    for before, after in zip(free, stopped, strict=True):
        assert after.token_ids.tolist() == before.token_ids.tolist()[: len(after.token_ids)]
        if "d" in before.text:
            assert after.finish_reason == "stop"
            assert after.text == before.text[: before.text.index("d") + 1]
        else:
            assert (after.finish_reason, after.text) == (before.finish_reason, before.text)


# ---- what is recorded ----


def test_versions_and_logprobs_are_recorded_for_every_token(harness):
    version = harness.engine.version()
    for sample in harness.complete(PROMPT, num_samples=4, seed=2):
        assert sample.policy_versions.tolist() == [version] * len(sample.token_ids)
        assert sample.token_ids.dtype == sample.policy_versions.dtype == np.int32
        assert sample.logprobs.dtype == np.float32
        assert (sample.logprobs <= 0).all()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_are_those_of_a_plain_forward_at_the_temperature(model_harness, temperature):
    for prompt in (PROMPT, LONG_PROMPT):
        for sample in model_harness.complete(prompt, num_samples=4, temperature=temperature, seed=8):
            assert model_harness.logprob_gap(prompt, sample, temperature=temperature) < 1e-4


def test_greedy_logprobs_are_those_of_the_unscaled_softmax(model_harness):
    (sample,) = model_harness.complete(PROMPT, temperature=0.0)
    assert model_harness.logprob_gap(PROMPT, sample, temperature=1.0) < 1e-4


@pytest.mark.usefixtures("seeds_and_cuts")
def test_under_top_k_and_top_p_logprobs_are_renormalised(model_harness):
    for sample in model_harness.complete(PROMPT, num_samples=4, temperature=0.8, top_k=6, top_p=0.7, seed=9):
        assert model_harness.kept_logprob_gap(PROMPT, sample, temperature=0.8, top_k=6, top_p=0.7) < 1e-4


@pytest.mark.usefixtures("seeds_and_cuts")
@pytest.mark.parametrize("cuts", [{"min_p": 0.2}, {"min_p": 0.05, "top_p": 0.9}])
def test_under_min_p_no_other_token_is_sampled_and_logprobs_are_renormalised(model_harness, cuts):
    def largest_gap(samples):
        return max(model_harness.kept_logprob_gap(PROMPT, sample, temperature=1.3, **cuts) for sample in samples)

    assert largest_gap(model_harness.complete(PROMPT, num_samples=8, temperature=1.3, seed=9, **cuts)) < 1e-4
    with pytest.raises(ValueError, match="is not in list"):  # a token that the cut leaves out
        largest_gap(model_harness.complete(PROMPT, num_samples=8, temperature=1.3, seed=9))


@pytest.mark.usefixtures("seeds_and_cuts")
def test_min_p_of_a_request_is_not_that_of_others_in_the_batch(model_harness):
    (greedy,) = model_harness.complete(PROMPT, temperature=0.0)
    requests = [request(f"{number}", PROMPT, num_samples=2, seed=9, min_p=float(number % 2)) for number in range(4)]
    results = model_harness.generate(*requests)
    for number in range(4):
        for sample in results[f"{number}"].completions:
            if number % 2:  # the likeliest token alone
                assert sample.token_ids.tolist() == greedy.token_ids.tolist() and not sample.logprobs.any()
            else:
                assert model_harness.logprob_gap(PROMPT, sample, temperature=1.0) < 1e-4


@pytest.mark.usefixtures("seeds_and_cuts")
def test_a_repetition_penalty_is_on_each_token_that_came_before(model_harness):
    penalty = 1.3
    for temperature, num_samples in ((0.0, 1), (0.8, 4)):
        sampling = {"temperature": temperature, "repetition_penalty": penalty}
        for sample in model_harness.complete(PROMPT, num_samples=num_samples, seed=9, **sampling):
            logits = model_harness.logits(PROMPT, sample)
            for place, row in enumerate(logits):
                for token in {*PROMPT, *sample.token_ids[:place].tolist()}:
                    row[token] *= 1 / penalty if row[token] > 0 else penalty
            expected = log_softmax_of(logits / (temperature or 1.0), sample.token_ids)
            assert np.abs(expected - sample.logprobs).max() < 1e-4


# ---- refusals ----


@pytest.mark.parametrize(
    ("prompt", "sampling", "reason"),
    [
        (range(2, 2 + MAX_MODEL_LEN), {}, "256 tokens"),
        ([5, 320], {}, "token id 320"),
        ([5, -1], {}, "token id -1"),
        ([], {}, "empty"),
        ([5], {"top_p": 0.0}, "top_p"),
        ([5], {"min_p": 1.5}, "min_p"),
        ([5], {"repetition_penalty": 0.0}, "repetition_penalty"),
        ([5], {"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_a_bad_request_is_a_result_with_an_error_and_the_engine_goes_on(harness, prompt, sampling, reason):
    results = harness.generate(request("bad", prompt, **sampling), request("good", PROMPT))
    assert reason in results["bad"].error
    assert not results["bad"].completions
    assert results["good"].error is None
    assert harness.engine.num_sequences() == 0


def test_unfinished_requests_need_different_ids(harness):
    harness.engine.submit(request("twin", PROMPT, max_new_tokens=100, num_samples=2))
    with pytest.raises(EngineError, match="twin"):
        harness.engine.submit(request("twin", PROMPT))
    assert harness.engine.result("twin", TIMEOUT_S).request_id == "twin"


# ---- weight updates ----


def test_an_update_is_served_from_the_commit_on(harness):
    before = harness.engine.version()
    cached = harness.complete(LONG_PROMPT, num_samples=2, seed=6)  # its keys and values stay in a prefix cache
    version = harness.sync(1 - harness.serving)
    assert version == harness.engine.version() == before + 1
    after = harness.complete(LONG_PROMPT, num_samples=2, seed=6)
    assert after[0].policy_versions.tolist() == [version] * len(after[0].token_ids)
    assert tokens(after) != tokens(cached)
    if harness.has_model:
        for prompt in (LONG_PROMPT, PROMPT):
            for sample in harness.complete(prompt, num_samples=4, temperature=0.7, seed=6):
                assert harness.logprob_gap(prompt, sample, temperature=0.7) < 1e-4


@pytest.mark.usefixtures("seeds_and_cuts")
def test_going_back_to_the_old_weights_gives_the_old_tokens_and_logprobs(model_harness):
    first = model_harness.complete(PROMPT, num_samples=4, seed=17)
    model_harness.sync(1 - model_harness.serving)
    model_harness.sync(1 - model_harness.serving)
    second = model_harness.complete(PROMPT, num_samples=4, seed=17)
    assert tokens(first) == tokens(second)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


@pytest.mark.usefixtures("seeds_and_cuts")
def test_staging_leaves_the_old_weights_serving_until_the_commit(harness):
    serving, version = harness.serving, harness.engine.version()
    before = harness.complete(PROMPT, num_samples=2, seed=23)
    staged = harness.stage_checkpoint(1 - serving)
    between = harness.complete(PROMPT, num_samples=2, seed=23)
    assert tokens(before) == tokens(between)
    assert between[0].policy_versions[0] == version
    harness.commit(staged, 1 - serving)


def test_an_update_is_received_while_requests_run(harness):
    for i in range(4):
        harness.engine.submit(request(f"meanwhile {i}", range(5 + i, 100), max_new_tokens=100, num_samples=2))
    version = harness.stage_checkpoint(1 - harness.serving)
    assert all(harness.engine.result(f"meanwhile {i}", TIMEOUT_S).error is None for i in range(4))
    harness.commit(version, 1 - harness.serving)


def test_only_the_staged_version_can_be_committed(harness):
    version = harness.stage_checkpoint(1 - harness.serving)
    with pytest.raises(EngineError, match=f"{version + 1}"):
        harness.engine.commit_weights(version + 1, in_flight=False, timeout_s=TIMEOUT_S)
    harness.commit(version, 1 - harness.serving)
    with pytest.raises(EngineError, match="None"):
        harness.engine.commit_weights(version, in_flight=False, timeout_s=TIMEOUT_S)


@pytest.mark.usefixtures("seeds_and_cuts")
def test_a_transfer_that_fails_leaves_the_old_weights_serving(harness):
    before = harness.complete(PROMPT, num_samples=2, seed=31)
    version = harness.next_version()
    broken = [(name, tensor.clone()) for name, tensor in harness.weights(1 - harness.serving)]
    broken[-1][1].view(-1)[0] = torch.nan
    manifest = build_manifest(broken, policy_version=version, bucket_bytes=2**16)
    with pytest.raises(TransferError, match=f"tensor '{broken[-1][0]}' holds NaN or infinity; nothing was committed"):
        harness.stage(manifest, broken)
    with pytest.raises(EngineError):
        harness.engine.commit_weights(version, in_flight=False, timeout_s=TIMEOUT_S)
    assert tokens(harness.complete(PROMPT, num_samples=2, seed=31)) == tokens(before)
    harness.sync(1 - harness.serving)  # over a new group
    if harness.has_model:
        (sample,) = harness.complete(PROMPT)
        assert harness.logprob_gap(PROMPT, sample, temperature=1.0) < 1e-4


@pytest.mark.parametrize("fault", ["missing layer", "unknown name", "wrong shape", "wrong dtype", "head"])
def test_an_update_that_is_not_this_model_is_refused_before_a_byte_is_sent(harness, fault):
    good = harness.weights(0)
    tied = "lm_head.weight" not in dict(good)  # a tied head must not be sent, another one must
    with_head = [*good, ("lm_head.weight", torch.zeros(320, 64))]
    without_head = [pair for pair in good if pair[0] != "lm_head.weight"]
    name = "model.layers.1.mlp.up_proj.weight"
    bad = {
        "missing layer": [pair for pair in good if pair[0] != name],
        "unknown name": [*good, ("model.layers.2.mlp.up_proj.weight", torch.zeros(128, 64))],
        "wrong shape": [(n, t.T if n == name else t) for n, t in good],
        "wrong dtype": [(n, t.half() if n == name else t) for n, t in good],
        "head": with_head if tied else without_head,
    }[fault]
    manifest: WeightManifest = build_manifest(bad, policy_version=harness.next_version())
    (invitation,) = harness.sender.open([1])
    with pytest.raises(TransferError, match=r"lm_head|layers\.[12]\.mlp\.up_proj\.weight"):
        harness.engine.stage_weights(manifest, invitation, timeout_s=5.0)
    harness.sender.close()
    assert len(harness.complete(PROMPT)) == 1
