"""Test runs in which engines and trainers share their devices, beside runs on devices of their own."""

import json
import os
import re
import shlex

import pytest
from safetensors.torch import load_file

from tests.integration.runs.records import assert_engine_and_trainer_agree, lines, read_rollouts

STEPS = 8
LAYOUTS = {
    "dp1": ("-t", 1),
    "dp2": ("-t", 2, "-tbs", 2, "-tMbs", 2),
    "tp2": ("-t", 2, "-tp", 2, "-tbs", 4, "-tMbs", 4),
    "fsdp2": ("-t", 2, "--plugin", "fsdp2", "-tbs", 2, "-tMbs", 2),
}
ADAPTER = ("--lora-rank", 4, "--lora-sync", "adapter")  # alone, beside the base that the engine keeps
CASES = [("dp1", "vllm"), ("dp1", "transformers"), ("dp2", "transformers"), ("tp2", "vllm"), ("fsdp2", "vllm")]
# Of a clock, of what a machine does meanwhile, or of how requests met in an engine, which changes how it rounds.
MEASURED = re.compile(r"_s$|_per_second|idle|memory|seconds|^time|utilization|bytes|gap")


def job_of(make_tiny, flags, layout, backend, *more):
    base = flags(make_tiny(tied=True))
    return [
        *base,
        *LAYOUTS[layout],
        "-b",
        backend,
        "-nb",
        0,
        "--max-steps",
        STEPS,
        "-si",
        4,
        "-kl",
        0.01,
        "--old-logprobs",
        "trainer",
        *more,
    ]


def tensors(run, step):
    """Of weights and optimizer, by file and name."""
    directory = run.run_dir / "checkpoints" / f"step-{step}"
    return {
        (str(path.relative_to(directory)), name): tensor.numpy().tobytes()
        for path in sorted(directory.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def numbers(run):
    """The metrics of each step, without what is measured."""
    return [{k: v for k, v in record.items() if not MEASURED.search(k)} for record in run.records()]


def assert_same_training(left, right):
    assert tensors(left, STEPS) == tensors(right, STEPS) != {}
    assert [json.dumps(each) for each in read_rollouts(left)] == [json.dumps(each) for each in read_rollouts(right)]
    assert numbers(left) == numbers(right) != []


def assert_same(left, right):
    assert_same_training(left, right)
    digests = [[line["digest"] for line in lines(run.run_dir / "syncs.jsonl")] for run in (left, right)]
    assert digests[0] == digests[1]


@pytest.fixture
def one_core():
    """In turns a process has the cores of both; a product rounds by its number of threads."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.full
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize(("layout", "backend"), CASES, ids=["-".join(case) for case in CASES])
def test_in_turns_every_bit_is_that_of_a_run_on_devices_of_its_own(make_tiny, start_run, flags, layout, backend):
    job = job_of(make_tiny, flags, layout, backend)
    apart, in_turns = (start_run(*job, *more, name=f"run{len(more)}") for more in ((), ("--colocate",)))
    assert apart.wait() == 0, apart.text()
    assert in_turns.wait() == 0, in_turns.text()
    assert_same(apart, in_turns)
    assert_engine_and_trainer_agree(in_turns.records())
    assert in_turns.left_over() == []


@pytest.mark.full
@pytest.mark.usefixtures("one_core")
def test_in_turns_adapters_alone_have_every_bit_of_a_run_on_devices_of_its_own(make_tiny, start_run, flags):
    job = job_of(make_tiny, flags, "dp1", "vllm", *ADAPTER)
    apart, in_turns = (start_run(*job, *more, name=f"run{len(more)}") for more in ((), ("--colocate",)))
    assert apart.wait() == 0, apart.text()
    assert in_turns.wait() == 0, in_turns.text()
    assert_same(apart, in_turns)


@pytest.mark.full
@pytest.mark.usefixtures("one_core")
def test_a_killed_run_whose_models_lie_elsewhere_goes_on_to_the_bits_of_one_that_keeps_them(
    make_tiny, start_run, flags
):
    job = job_of(make_tiny, flags, "dp2", "transformers")
    whole = start_run(*job, name="whole")
    assert whole.wait() == 0, whole.text()
    run = start_run(*job, "--offload", "all", name="killed")
    run.wait_for_step(5)
    for process in run.processes("ray::TrainerActor"):
        process.kill()
    assert run.wait() == 1, run.text()
    resume = re.search(r"; resume from step 4 with: python \S+rl_example\.py (.*)$", run.text().splitlines()[-1])
    assert resume, run.text()
    assert "offload" in (run.run_dir / "config.yaml").read_text()
    resumed = start_run(*shlex.split(resume[1]), name="killed")
    assert resumed.wait() == 0, resumed.text()
    assert_same_training(whole, resumed)
    assert resumed.left_over() == []


@pytest.mark.full
@pytest.mark.parametrize("victim", ["TrainerActor", "ProducerActor"])
def test_after_a_kill_in_either_turn_the_weights_are_those_of_an_undisturbed_run(make_tiny, start_run, flags, victim):
    job = job_of(make_tiny, flags, "dp1", "transformers", "--colocate")
    whole = start_run(*job, name="whole")
    assert whole.wait() == 0, whole.text()
    run = start_run(*job, name="killed")
    run.wait_for_step(5)
    for process in run.processes(f"ray::{victim}"):
        process.kill()
    if victim == "TrainerActor":
        assert run.wait() == 1, run.text()
        resume = re.search(r"; resume from step 4 with: python \S+rl_example\.py (.*)$", run.text().splitlines()[-1])
        assert resume, run.text()
        run = start_run(*shlex.split(resume[1]), name="killed")
    assert run.wait() == 0, run.text()
    assert tensors(run, STEPS) == tensors(whole, STEPS)
    assert run.left_over() == []
