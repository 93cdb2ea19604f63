"""Test engines that give their memory up in the trainers' turn: what they answer afterwards, and when."""

from tests.integration.engines.harness import TIMEOUT_S, Harness, request
from tests.integration.engines.test_commit import LONG_PROMPT, collect, submit_many

PROMPT = tuple(range(40, 60))


def test_after_its_sleep_an_engine_answers_as_if_it_had_not_slept(harness: Harness) -> None:
    before = harness.complete(PROMPT, num_samples=3, temperature=0.8, seed=5, max_new_tokens=40)
    for _ in range(2):
        harness.put_to_sleep()
        harness.put_to_sleep()  # it sleeps already
        harness.sync(harness.serving)
    after = harness.complete(PROMPT, num_samples=3, temperature=0.8, seed=5, max_new_tokens=40)
    if harness.has_model:
        assert [each.token_ids.tolist() for each in after] == [each.token_ids.tolist() for each in before]
        assert [each.logprobs.tolist() for each in after] == [each.logprobs.tolist() for each in before]


def test_the_weights_that_are_committed_after_a_sleep_serve(model_harness: Harness) -> None:
    harness = model_harness
    harness.put_to_sleep()
    version = harness.sync(1 - harness.serving)
    (completion,) = harness.complete(LONG_PROMPT, seed=3)
    assert set(completion.policy_versions.tolist()) == {version}
    assert harness.logprob_gap(LONG_PROMPT, completion, temperature=1.0) < 1e-4
    assert harness.probe_gap(LONG_PROMPT) < 1e-4


def test_requests_wait_for_the_end_of_the_sleep(harness: Harness) -> None:
    harness.put_to_sleep()
    harness.engine.submit(request("early", PROMPT, num_samples=1, max_new_tokens=4))
    version = harness.stage_checkpoint(harness.serving)
    assert not harness.engine.is_done("early")
    harness.commit(version, harness.serving)
    (completion,) = harness.engine.result("early", TIMEOUT_S).completions
    assert set(completion.policy_versions.tolist()) == {version}


def test_running_requests_go_on_with_the_weights_of_the_next_commit(model_harness: Harness) -> None:
    harness = model_harness
    first = harness.engine.version()
    prompts = submit_many(harness)
    harness.put_to_sleep()
    assert not all(harness.engine.is_done(name) for name in prompts)
    version = harness.sync(1 - harness.serving, in_flight=True)
    samples = [(prompts[name], each) for name, group in collect(harness, prompts).items() for each in group]
    assert {v for _, each in samples for v in each.policy_versions.tolist()} <= {first, version}
    for prompt, sample in samples:
        assert max(harness.logprob_gap_by_version(prompt, sample, temperature=0.8).values()) < 1e-4
