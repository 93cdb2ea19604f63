"""Samplers on one base: each request's bits are its own, whatever is beside it, and they are the trainer's numbers."""

import asyncio
import random

import numpy as np
import pytest
import torch

from coati_rl.tinker.core import Datum, LossRequest, ModelSpec, RequestError, SampleRequest
from producer.samplers.transformers_samplers import TransformersSamplers
from tests.reference_training import ReferenceTraining


@pytest.fixture(scope="module")
def trained(model_dir, tmp_path_factory):
    """A training part with models a and b, whose B is not 0, and their directories."""
    training, directories = ReferenceTraining(model_dir), {}
    for number, name in enumerate(("a", "b")):
        training.create(name, ModelSpec(rank=4, seed=number))
        generator = torch.Generator().manual_seed(number)
        for key, weight in training._models[name].weights.items():
            if key.endswith("lora_B"):
                weight.data = torch.randn(weight.shape, generator=generator) * 0.05
        directories[name] = tmp_path_factory.mktemp(name)
        training.save(name, directories[name], with_optimizer=False)
    return training, directories


@pytest.fixture
def samplers(model_dir, trained):
    made = TransformersSamplers(model_dir, max_tokens=512)
    for name, directory in trained[1].items():
        made.publish(name, directory)
    yield made
    asyncio.run(made.close())


def requests(count, **others):
    rng = random.Random(0)
    return [
        SampleRequest(
            sampler=rng.choice(("a", "b", "")),
            prompt=[rng.randrange(3, 250) for _ in range(rng.randint(1, 90))],
            num_samples=rng.randint(1, 5),
            max_tokens=rng.randint(1, 12),
            temperature=rng.choice((0.0, 0.7, 1.0)),
            top_k=rng.choice((-1, 5)),
            top_p=rng.choice((1.0, 0.8)),
            seed=rng.randrange(10),
            **others,
        )
        for _ in range(count)
    ]


def test_a_prompt_that_cannot_be_computed_is_answered_with_why_and_the_next_one_as_ever(samplers, monkeypatch):
    def too_large(*_, **__):
        raise RuntimeError("CUDA out of memory")

    async def asked():
        return await asyncio.wait_for(samplers.sample(SampleRequest(sampler="a", prompt=[5, 6], max_tokens=2)), 20)

    with monkeypatch.context() as patch:
        patch.setattr("producer.samplers.transformers_samplers.prefill", too_large)
        with pytest.raises(RuntimeError, match="CUDA out of memory"):
            asyncio.run(asked())
    assert 1 <= len(asyncio.run(asked()).sequences[0].token_ids) <= 2


def bits(result):
    return [(each.token_ids, each.logprobs, each.has_stopped) for each in result.sequences]


async def staggered(samplers, asked):
    async def one(delay, request):
        await asyncio.sleep(delay)
        return await samplers.sample(request)

    rng = random.Random(1)
    return await asyncio.gather(*(one(rng.random() * 0.1, each) for each in asked))


@pytest.mark.full
def test_a_request_has_the_same_bits_alone_and_among_others_at_any_time(samplers):
    asked = requests(24)
    alone = [bits(asyncio.run(samplers.sample(each))) for each in asked]
    together = asyncio.run(staggered(samplers, asked))
    backwards = asyncio.run(staggered(samplers, asked[::-1]))[::-1]
    assert [bits(each) for each in together] == alone == [bits(each) for each in backwards]


def test_samples_of_a_request_differ_and_seeds_that_follow_each_other_share_none(samplers):
    def tokens(seed):
        request = SampleRequest(sampler="a", prompt=[5, 6], num_samples=3, max_tokens=12, seed=seed, stop_ids=())
        return [tuple(each.token_ids) for each in asyncio.run(samplers.sample(request)).sequences]

    found = tokens(1) + tokens(2) + tokens(3)
    assert len(set(found)) == 9 and tokens(2) == found[3:6]


@pytest.mark.parametrize("name", ["a", "b"])
def test_log_probabilities_are_the_trainer_s(trained, samplers, name):
    prompt = [int(each) for each in np.random.default_rng(0).integers(3, 250, 200)]
    asked = {
        "max_tokens": 20,
        "seed": 3,
        "temperature": 0.5,
        "top_k": 20,
        "stop_ids": (),
        "wants_prompt_logprobs": True,
    }
    found = asyncio.run(samplers.sample(SampleRequest(sampler=name, prompt=prompt, top_k_prompt_logprobs=3, **asked)))
    whole = np.array([*prompt, *found.sequences[0].token_ids])
    datum = Datum(tokens=whole[:-1], inputs={"target_tokens": whole[1:]})
    request = LossRequest(model=name, data=[datum], loss="cross_entropy", is_forward_only=True)
    expected = trained[0].forward_backward([request])[0].logprobs[0]
    assert np.abs(expected[-20:] - found.sequences[0].logprobs).max() < 1e-5
    assert np.abs(expected[: len(prompt) - 1] - found.prompt_logprobs[1:]).max() < 1e-5
    ids, logprobs = found.top_k_prompt
    assert ids.shape == logprobs.shape == (200, 3) and (np.diff(logprobs[1:]) <= 0).all()
    places = [(row, list(ids[row]).index(prompt[row])) for row in range(1, 200) if prompt[row] in ids[row]]
    assert all(abs(logprobs[row, place] - found.prompt_logprobs[row]) < 1e-6 for row, place in places)


def test_a_cancelled_request_leaves_its_places_to_others(samplers):
    async def run():
        long = SampleRequest(sampler="a", prompt=[5], num_samples=300, max_tokens=400, seed=0, stop_ids=())
        task = asyncio.ensure_future(samplers.sample(long))
        await asyncio.sleep(0.2)
        task.cancel()
        short = SampleRequest(sampler="a", prompt=[6], max_tokens=3, seed=0, stop_ids=())
        return await asyncio.wait_for(samplers.sample(short), 20)

    assert len(asyncio.run(run()).sequences[0].token_ids) == 3


def test_a_stop_text_ends_a_sample_with_the_token_that_completes_it(samplers):
    free = SampleRequest(sampler="b", prompt=[40, 41], max_tokens=12, temperature=0.0, stop_ids=())
    tokens = list(asyncio.run(samplers.sample(free)).sequences[0].token_ids)
    text = samplers._decode(tokens[:4])
    request = SampleRequest(sampler="b", prompt=[40, 41], max_tokens=12, temperature=0.0, stop_texts=(text[-1:],))
    found = asyncio.run(samplers.sample(request)).sequences[0]
    assert found.has_stopped and len(found.token_ids) <= 4
    assert text[-1:] in samplers._decode(found.token_ids)


def test_what_cannot_be_answered_is_refused(samplers, tmp_path):
    for wrong in ({"prompt": []}, {"prompt": [10**6]}, {"prompt": [-1]}, {"prompt": [1] * 512}):
        with pytest.raises(RequestError, match="prompt"):
            samplers.check(SampleRequest(sampler="", **wrong))
    with pytest.raises(RequestError, match="no sampler"):
        asyncio.run(samplers.sample(SampleRequest(sampler="unknown", prompt=[1])))
    with pytest.raises(RequestError):
        samplers.publish("c", tmp_path)
    samplers.withdraw("a")
    asyncio.run(samplers.sample(SampleRequest(sampler="", prompt=[1], max_tokens=1)))
    with pytest.raises(RequestError, match="no sampler"):
        asyncio.run(samplers.sample(SampleRequest(sampler="a", prompt=[1])))
