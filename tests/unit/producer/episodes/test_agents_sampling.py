"""Read from what agents of other systems hand on how a turn is sampled."""

from types import SimpleNamespace

import pytest

from producer.environments.compatible.sampling import changes_of, fields_of, params_of
from producer.environments.episode import EpisodeFailure

RUN = {"temperature": 0.7, "top_p": 0.9, "top_k": None, "min_p": 0.1, "max_new_tokens": 64, "stop": ("END",)}
GREEDY = {**RUN, "temperature": 0.0, "top_k": 5}


@pytest.mark.parametrize("run", [RUN, GREEDY])
def test_what_is_handed_on_as_it_was_given_changes_nothing(run):
    assert changes_of(params_of(run), run) is None
    assert changes_of(fields_of(run), run) is None
    assert changes_of(None, run) is None
    assert changes_of(SimpleNamespace(temperature=None, max_tokens=None), run) is None


def test_what_differs_is_sampled_as_the_agent_says():
    params = params_of(RUN)
    params.temperature, params.max_tokens, params.stop, params.seed = 0.5, 3, "x", 9
    assert changes_of(params, RUN) == {"temperature": 0.5, "max_new_tokens": 3, "stop": ["x"], "seed": 9}
    assert changes_of({"max_new_tokens": 3, "top_k": 4}, RUN) == {"max_new_tokens": 3, "top_k": 4}
    assert changes_of({"min_p": 0.2}, RUN) == {"min_p": 0.2}
    assert changes_of({"top_k": -1, "stop": []}, GREEDY) == {"top_k": None, "stop": []}


def test_more_tokens_than_the_run_allows_are_those_that_it_allows():
    assert changes_of({"max_tokens": 4000}, RUN) is None


# The values of vLLM's SamplingParams() besides those that are read; it samples at temperature 1 by default.
VLLM = SimpleNamespace(
    n=1, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, temperature=1.0, top_p=1.0, top_k=0,
    min_p=0.0, seed=None, stop=[], stop_token_ids=[], ignore_eos=False, max_tokens=16, min_tokens=0, logprobs=None,
    detokenize=True, skip_special_tokens=True, bad_words=[], logit_bias=None, allowed_token_ids=None,
    structured_outputs=None, include_stop_str_in_output=False,
)  # fmt: skip


def test_an_object_of_vllm_is_read_with_its_defaults():
    assert changes_of(VLLM, RUN) == {
        "temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "stop": [], "max_new_tokens": 16
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 0.5), ("frequency_penalty", 1), ("repetition_penalty", 1.1),
        ("min_tokens", 4), ("stop_token_ids", [3]), ("bad_words", ["a"]), ("allowed_token_ids", [1]),
        ("logit_bias", {1: 2.0}), ("ignore_eos", True), ("structured_outputs", object()),
        ("include_stop_str_in_output", True), ("logits_processors", [print]), ("n", 4),
    ],
)  # fmt: skip
def test_what_would_sample_another_distribution_is_refused_by_name(name, value):
    for params in ({name: value}, SimpleNamespace(**{**vars(VLLM), name: value})):
        with pytest.raises(EpisodeFailure, match=name):
            changes_of(params, RUN)


def test_a_name_that_nobody_knows_is_refused():
    with pytest.raises(EpisodeFailure, match="temprature is not supported"):
        changes_of({"temprature": 1.0}, RUN)
