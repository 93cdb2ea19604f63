"""Test when staged weights are swapped in: under running requests, or when none is running.

Under running requests each token has the version that sampled it, its log-probability is that version's given all
earlier tokens, and running requests continue to their end.
"""

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from coati_rl.errors import EngineError
from coati_rl.types import Completion
from tests.integration.engines.harness import MAX_MODEL_LEN, MAX_NUM_SEQS, TIMEOUT_S, Harness, request

pytestmark = pytest.mark.usefixtures("model_harness")  # the fake engine has no weights
EOS = 0
PROMPTS = [tuple(range(40 + i, 60 + i)) for i in range(12)]
LONG_PROMPT = tuple(2 + (7 * place) % 300 for place in range(150))  # more than one block of vLLM's prefix cache
NUM_TOKENS = 60


def submit_many(harness: Harness) -> dict[str, tuple[int, ...]]:
    """More samples than are decoded at a time, so that some are running and some are waiting for a while."""
    prompts = {f"request {i}": prompt for i, prompt in enumerate([LONG_PROMPT, *PROMPTS])}
    for i, (name, prompt) in enumerate(prompts.items()):
        harness.engine.submit(request(name, prompt, max_new_tokens=NUM_TOKENS, temperature=0.8, seed=1000 + 10 * i))
    return prompts


def collect(harness: Harness, names: Iterable[str]) -> dict[str, tuple[Completion, ...]]:
    completions = {}
    for name in names:
        result = harness.engine.result(name, TIMEOUT_S)
        assert result.error is None
        completions[name] = result.completions
    return completions


@pytest.mark.usefixtures("seeds_and_cuts")
def test_an_engine_of_unproven_weights_commits_version_zero(harness):
    assert harness.before_first_commit.policy_versions.tolist() == [-1] * len(harness.before_first_commit.token_ids)
    assert harness.first_version == 0
    assert harness.after_first_commit.token_ids.tolist() == harness.before_first_commit.token_ids.tolist()
    assert harness.after_first_commit.policy_versions.tolist() == [0] * len(harness.after_first_commit.token_ids)


def test_every_token_is_of_the_weights_that_its_version_names(harness):
    first = harness.engine.version()
    prompts = submit_many(harness)
    versions = [harness.sync(1 - harness.serving, in_flight=True) for _ in range(3)]
    assert versions == [first + 1, first + 2, first + 3]
    completions = collect(harness, prompts)
    samples = [(prompts[name], sample) for name, group in completions.items() for sample in group]
    assert len(samples) == len(prompts) > MAX_NUM_SEQS
    for prompt, sample in samples:
        ids, by_token = sample.token_ids.tolist(), sample.policy_versions.tolist()
        assert by_token == sorted(by_token)
        assert set(by_token) <= {first, *versions}
        assert sample.finish_reason == ("stop" if ids[-1] == EOS else "length")
        assert ids[-1] == EOS or len(ids) == min(NUM_TOKENS, MAX_MODEL_LEN - len(prompt))
        assert max(harness.logprob_gap_by_version(prompt, sample, temperature=0.8).values()) < 1e-4
    assert sum(len(set(sample.policy_versions.tolist())) > 1 for _, sample in samples) >= 4
    (after,) = harness.complete(LONG_PROMPT, seed=1)  # what its prefix cache holds is of the last version
    assert set(after.policy_versions.tolist()) == {versions[-1]}
    assert harness.logprob_gap(LONG_PROMPT, after, temperature=1.0) < 1e-4


@pytest.mark.usefixtures("seeds_and_cuts")
def test_the_tokens_before_the_commit_are_those_of_an_engine_that_is_left_alone(harness):
    prompts = submit_many(harness)
    alone = collect(harness, prompts)
    first = harness.engine.version()
    submit_many(harness)
    harness.sync(1 - harness.serving, in_flight=True)
    for name, group in collect(harness, prompts).items():
        for before, after in zip(alone[name], group, strict=True):
            num_old = int((after.policy_versions == first).sum())
            assert after.token_ids[:num_old].tolist() == before.token_ids[:num_old].tolist()


@pytest.mark.sampled(2)
def test_a_commit_waits_until_no_request_runs_and_a_stream_of_requests_does_not_starve_it(harness):
    version = harness.stage_checkpoint(1 - harness.serving)
    names = [f"running {i}" for i in range(4)]
    for i, name in enumerate(names):
        harness.engine.submit(request(name, range(5 + i, 200), max_new_tokens=40, num_samples=4))
    with ThreadPoolExecutor(max_workers=1) as pool:
        committed = pool.submit(harness.commit, version, 1 - harness.serving)
        while not committed.done():
            names.append(f"later {len(names)}")
            harness.engine.submit(request(names[-1], PROMPTS[0]))
            time.sleep(0.01)
        committed.result()
    names.append("last")
    harness.engine.submit(request("last", PROMPTS[0]))
    versions = {
        name: {int(v) for sample in samples for v in sample.policy_versions}
        for name, samples in collect(harness, names).items()
    }
    assert all(versions[name] == {version - 1} for name in names[:4])
    assert all(len(one) == 1 for one in versions.values())
    assert versions["last"] == {version}


@pytest.mark.sampled(2)
def test_a_commit_that_waits_too_long_is_withdrawn_and_may_be_made_again(harness):
    version = harness.stage_checkpoint(1 - harness.serving)
    for i in range(4):
        harness.engine.submit(request(f"running {i}", range(5 + i, 200), max_new_tokens=40, num_samples=4))
    with pytest.raises(EngineError, match=r"[1-4] requests were still running"):
        harness.engine.commit_weights(version, in_flight=False, timeout_s=0.0)
    for samples in collect(harness, [f"running {i}" for i in range(4)]).values():
        assert {int(sample.policy_versions[0]) for sample in samples} == {version - 1}
    assert harness.engine.version() == version - 1
    harness.commit(version, 1 - harness.serving)


@pytest.mark.sampled(2)
def test_a_probe_sees_the_serving_weights_alone_whatever_runs_beside_it(harness):
    for probe in (LONG_PROMPT, PROMPTS[0]):
        harness.complete(probe)  # its keys and values are in the prefix cache now
        assert harness.probe_gap(probe) < 1e-4
    prompts = submit_many(harness)
    for _ in range(2):
        harness.sync(1 - harness.serving, in_flight=True)
        for probe in (LONG_PROMPT, PROMPTS[0], PROMPTS[0][:2]):
            assert harness.probe_gap(probe) < 1e-4
    collect(harness, prompts)
    assert len(harness.engine.probe([5], timeout_s=TIMEOUT_S).logprobs) == 0
    assert harness.engine.num_sequences() == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("commits", [False, True])
def test_a_probe_does_not_wait_for_samples_that_are_queued(stepwise_harness, commits):
    prompts = submit_many(stepwise_harness)
    if commits:  # running samples begin anew, ahead of those that wait
        stepwise_harness.sync(1 - stepwise_harness.serving, in_flight=True)
    assert stepwise_harness.probe_gap(PROMPTS[0]) < 1e-4
    assert stepwise_harness.engine.num_sequences() > MAX_NUM_SEQS  # more than run at a time
    collect(stepwise_harness, prompts)
    assert stepwise_harness.probe_gap(PROMPTS[0]) < 1e-4


@pytest.mark.sampled(2)
def test_probes_and_commits_may_meet(harness):
    prompts = submit_many(harness)
    with ThreadPoolExecutor(max_workers=1) as pool:
        probes = [pool.submit(harness.engine.probe, LONG_PROMPT, timeout_s=TIMEOUT_S) for _ in range(8)]
        for _ in range(2):
            harness.sync(1 - harness.serving, in_flight=True)
        answers = {tuple(probe.result(timeout=TIMEOUT_S).logprobs.round(3).tolist()) for probe in probes}
    assert len(answers) <= 2  # of the one checkpoint or the other, never of both
    collect(harness, prompts)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("token_ids", "reason"), [([], "empty"), ([5, 320], "320"), (range(2, 258), "256 tokens")])
def test_a_probe_that_the_model_cannot_take_is_refused(harness, token_ids, reason):
    with pytest.raises(EngineError, match=reason):
        harness.engine.probe(list(token_ids), timeout_s=TIMEOUT_S)
    assert harness.probe_gap(PROMPTS[0]) < 1e-4
