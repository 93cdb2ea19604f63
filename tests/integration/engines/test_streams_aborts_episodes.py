"""Test streams, aborts and episodes of a GenerationEngine.

Streamed tokens equal the result's, an aborted request returns its tokens so far, and a commit waits for an episode that
waits for a tool.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from coati_rl.types import Completion
from tests.integration.engines.harness import TIMEOUT_S, request

PROMPT = tuple(range(40, 60))
LONG_PROMPT = tuple(2 + (7 * place) % 300 for place in range(200))  # more than one block of vLLM's prefix cache


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


@pytest.mark.parametrize("sampling", [{"seed": 70}, {"seed": 71, "stop": ("d", "zzz")}, {"temperature": 0.0}])
def test_what_is_streamed_is_what_the_result_says(stepwise_harness, sampling):
    one = request("streamed", PROMPT, num_samples=5, max_new_tokens=24, **sampling)
    alone = stepwise_harness.generate(one)["streamed"]
    stepwise_harness.engine.stream(one)
    final = stepwise_harness.engine.result("streamed", TIMEOUT_S)
    assert tokens(final.completions) == tokens(alone.completions)
    chunks = stepwise_harness.engine.chunks("streamed")
    # They came in parts. Under some weights the most probable first token ends a response: one part is all of it then.
    assert len(chunks) > 5 or all(len(sample.token_ids) == 1 for sample in final.completions)
    for index, sample in enumerate(final.completions):
        parts = [chunk for chunk in chunks if chunk.index == index]
        for name in ("token_ids", "logprobs", "policy_versions"):
            whole = getattr(sample, name)
            streamed = np.concatenate([getattr(chunk, name) for chunk in parts])
            np.testing.assert_array_equal(streamed, whole)
            assert streamed.dtype == whole.dtype


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_an_aborted_request_gives_what_was_sampled_and_leaves_the_others_alone(stepwise_harness, num_tokens):
    long = request("long", PROMPT, num_samples=6, max_new_tokens=40, seed=80)
    whole = stepwise_harness.generate(long)["long"].completions
    other = request("other", LONG_PROMPT, num_samples=2, seed=90, max_new_tokens=40)
    undisturbed = tokens(stepwise_harness.generate(other)["other"].completions)
    if num_tokens:
        stepwise_harness.engine.abort_after(long, num_tokens * 6)
    else:
        stepwise_harness.engine.submit(long)
        stepwise_harness.engine.abort("long")
        stepwise_harness.engine.abort("long")
    stepwise_harness.engine.submit(other)
    partial = stepwise_harness.engine.result("long", TIMEOUT_S)
    assert partial.error is None
    assert len(partial.completions) == 6
    for before, after in zip(whole, partial.completions, strict=True):
        length = len(after.token_ids)
        assert after.token_ids.tolist() == before.token_ids.tolist()[:length]
        np.testing.assert_allclose(after.logprobs, before.logprobs[:length], rtol=0, atol=1e-4)
        assert len(after.policy_versions) == length
        if length < len(before.token_ids):
            assert after.finish_reason == "abort"
            assert before.text.startswith(after.text.rstrip("\ufffd"))
        else:
            assert (after.finish_reason, after.text) == (before.finish_reason, before.text)
    if stepwise_harness.has_model:  # the fake engine has answered, or not begun
        assert "abort" in {sample.finish_reason for sample in partial.completions}
        assert max(len(sample.token_ids) for sample in partial.completions) in range(num_tokens, num_tokens + 4)
    assert tokens(stepwise_harness.engine.result("other", TIMEOUT_S).completions) == undisturbed
    assert stepwise_harness.engine.num_sequences() == 0
    assert tokens(stepwise_harness.generate(long)["long"].completions) == tokens(
        whole
    )  # its id is free, and the engine goes on


@pytest.mark.usefixtures("seeds_and_cuts")
def test_to_abort_what_is_unknown_or_finished_is_harmless(harness):
    before = harness.complete(PROMPT, num_samples=2, seed=31)
    harness.engine.abort("nobody")
    harness.engine.abort("only")  # which `complete` used
    assert tokens(harness.complete(PROMPT, num_samples=2, seed=31)) == tokens(before)


def test_a_commit_waits_for_an_episode_that_waits_for_a_tool(harness):
    first = harness.engine.version()
    version = harness.stage_checkpoint(1 - harness.serving)
    harness.engine.open_episode("episode")
    turn = replace(request("turn 1", PROMPT, num_samples=1, seed=4), episode_id="episode")
    (said,) = harness.generate(turn)["turn 1"].completions
    with ThreadPoolExecutor(max_workers=1) as pool:
        committed = pool.submit(harness.commit, version, 1 - harness.serving)
        with pytest.raises(TimeoutError):
            committed.result(timeout=0.3)  # the tool runs, and nothing else
        harness.engine.submit(request("other", PROMPT))
        prompt = [*PROMPT, *said.token_ids.tolist(), 50, 51]
        turn = replace(request("turn 2", prompt, seed=5), episode_id="episode")
        (answer,) = harness.generate(turn)["turn 2"].completions
        assert set(answer.policy_versions.tolist()) == {first}
        assert not harness.engine.is_done("other")
        harness.engine.close_episode("episode")
        committed.result(timeout=TIMEOUT_S)
    (other,) = harness.engine.result("other", TIMEOUT_S).completions
    assert set(other.policy_versions.tolist()) == {version}
