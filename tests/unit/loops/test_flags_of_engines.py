"""Test that fields of inference engines reach the engine that a producer makes.

The part of a test's name before two underscores is the field (see test_flags.py).
"""

import pytest

import producer.actor
from coati_rl.processes.actor_process import ActorContext
from producer.actor import ProducerActor


@pytest.fixture
def engine_options(monkeypatch, config_with, start_without_vllm, tmp_path):
    """Return what a producer makes its engine with."""

    def made(**changes):
        seen = []
        monkeypatch.setattr(producer.actor, "enter_actor", lambda context: None)
        monkeypatch.setattr("producer.engines.create_engine", lambda backend, options, **others: seen.append(options))
        of_actor = {"device": "cuda", "dtype": "bfloat16", "slot": 0, "num_slots": 1}
        context = ActorContext(name="producer-0", log_dir=tmp_path, **of_actor)
        config = config_with(backend="vllm", **changes)
        start_without_vllm(ProducerActor(0, config, context, make_reward=lambda: None))
        return seen[0]

    return made


def test_gpu_memory_utilization__is_the_engines_share(engine_options):
    assert engine_options(gpu_memory_utilization=0.5).gpu_memory_utilization == 0.5


def test_max_num_seqs__is_the_engines_and_by_default_all_that_is_in_flight(engine_options):
    in_flight = {"inference_microbatch_size": 2, "num_generations": 8}
    found = [engine_options(**in_flight, max_num_seqs=number).max_num_seqs for number in (None, 6)]
    assert found == [16, 6]


def test_block_size__is_that_of_the_engines_cache(engine_options):
    assert [engine_options(block_size=size).block_size for size in (None, 64)] == [None, 64]


def test_quantization__is_the_engines(engine_options):
    assert [engine_options(quantization=method).quantization for method in (None, "fp8")] == [None, "fp8"]


def test_enforce_eager__is_the_engines_and_lets_its_process_compile(engine_options, config_with):
    values = [None, True, False]
    assert [engine_options(enforce_eager=value).enforce_eager for value in values] == values
    configs = [config_with(backend="vllm", enforce_eager=value) for value in values]
    variables = [ProducerActor.environment(config, "cpu") for config in configs]
    assert [each.get("TORCHDYNAMO_DISABLE") for each in variables] == ["1", "1", None]


def test_engine_arg__reaches_the_engine_by_name(engine_options):
    texts = ["kv_cache_dtype=fp8", "max-num-batched-tokens=8192"]
    assert engine_options(engine_arg=texts).engine_args == {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 8192}


@pytest.mark.full
def test_partial_rollouts__asks_for_each_sample_alone_and_swaps_weights_in_flight(run_in_threads):
    """What it is for is in test_partial_rollouts.py."""
    traces = [run_in_threads({"n_behind": 1, "partial_rollouts": value}) for value in (False, True)]
    assert [{request.num_samples for request in trace.engines[0].requests} for trace in traces] == [{2}, {1}]
    assert [set(trace.engines[0].commits_in_flight) for trace in traces] == [{False}, {True}]
