"""Test the commands of docs/coming_from beside other projects' printed examples: each is read, one of a job is run.

Plans have the sizes that are printed; of the examples of a job on a page, one is planned without --all.
integration/runs/test_printed_examples.py runs each command as a user does.
"""

import json
import logging
import math
import os

import pytest

import rl_example
import rl_generate
from coati_rl.config import Config
from coati_rl.config.cli import parse, parse_job
from coati_rl.config.commands import OFFLINE
from coati_rl.config.generate import GenerateConfig
from consumer.__main__ import _main as train_on_dataset
from tests.printed_examples import (
    Places,
    read_examples,
    served_rewards,
    with_step_token,
    write_experts,
    write_reward_model,
)
from tests.unit.loops.offline_run import run_offline

EXAMPLES = [each for each in read_examples() if each.job != "merge"]  # of adapters that a run has written
LONG = 32_768  # positions of the model that stands for those of the pages
NUM_ROWS = 256  # which fill a step of the printed sizes
ON_CPU = {
    "--device": "cpu",
    "--precision": "fp32",
    "-zero": None,
    "--plugin": None,
    "--context-parallel": None,
    "-t": 1,
}
SMALL_JOB = {**ON_CPU, "-tbs": 4, "-tmbs": 2, "--max-length": 256, "-e": 1, "--max-steps": 2}
SMALL_SAMPLES = {"--device": "cpu", "-b": "fake", "-ptp": None, "-mpt": 128, "-mnt": 8, "-imbs": 4, "--max-samples": 12}
SMALL_RUN = {
    **ON_CPU, "-b": "fake", "-i": 1, "-ibs": 4, "-imbs": 2, "-tbs": 2, "-tMbs": 2, "-tmbs": 4, "-g": 2, "-mpt": 128,
    "-mnt": 16, "--max-steps": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def places(model_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("examples")
    policy = with_step_token(model_dir, directory / "policy", max_position_embeddings=LONG)
    experts = write_experts(policy, directory / "experts")
    judge = write_reward_model(policy, directory / "judge")
    with served_rewards() as url:
        yield Places(directory, policy, experts, judge, url, num_rows=NUM_ROWS)


@pytest.fixture(scope="module")
def sampled(places, tmp_path_factory):
    """The rows that the examples of batch inference write, by the name of their file; later examples read them."""
    rows = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
        patch.setattr(os, "environ", os.environ.copy())  # the command sets variables of its engine
        for example in (each for each in EXAMPLES if each.job == "generate"):
            words = places.words(example, sizes=SMALL_SAMPLES)
            assert rl_generate.main(words[1:], tmp_path_factory.mktemp("scratch")) == 0
            path = places.directory / example.words[example.words.index("-o") + 1]
            rows[path.name] = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
            path.unlink()
            path.with_name(f"{path.name}.progress").unlink()
    return rows


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """The words of a command -> its exit code and what it printed; nothing of a cluster may be started."""
    monkeypatch.setattr("coati_rl.driver.command.prepare_ray_environment", lambda config: pytest.fail("it was started"))
    # Some are of larger machines than this one.
    monkeypatch.setattr("coati_rl.preflight.memory_check.available_bytes", lambda: 2**40)
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.chdir(tmp_path)

    def run(job, *words):
        if job in OFFLINE:
            code = train_on_dataset(OFFLINE[job], words, tmp_path)
        else:
            code = {"rl": rl_example.main, "generate": rl_generate.main}[job](words, tmp_path)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_every_example_is_a_configuration(places, sampled):
    jobs = {**OFFLINE, "rl": Config, "generate": GenerateConfig}
    for example in EXAMPLES:
        assert parse_job(places.words(example)[1:], jobs[example.job])[0].model.model


FIRST_OF_A_PAGE = {(example.page, example.job): example for example in reversed(EXAMPLES)}.values()


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "example",
    [pytest.param(each, marks=() if each in FIRST_OF_A_PAGE else pytest.mark.full) for each in EXAMPLES],
    ids=lambda example: example.name,
)
def test_an_example_is_planned_with_the_sizes_that_are_printed(places, sampled, call, example):
    words = places.words(example)
    for name, rows in sampled.items():
        if str(places.directory / name) in words and example.job != "generate":
            many = rows * (NUM_ROWS // len(rows) + 1)
            (places.directory / name).write_text("".join(json.dumps(row) + "\n" for row in many))
    whole = ("-tp", "1") if "-tp" in words else ()  # the tiny model has one head of keys
    code, plan, errors = call(*words, *whole, "--device", "cpu", "--dry-run")
    assert code == 0, errors
    assert not [line for line in errors.splitlines() if "no effect" in line or "not on this machine" in line]
    assert ("optimizer steps" if example.job != "generate" else "samples") in plan


def test_samples_have_the_form_that_their_example_asks_for(sampled):
    assert len(sampled["rejection.jsonl"]) == 12 and {row["sample"] for row in sampled["rejection.jsonl"]} != {0}
    pairs = sampled["pairs.jsonl"]
    assert len(pairs) > 8 and all(row["chosen_reward"] > row["rejected_reward"] for row in pairs)
    told = [row["messages"][-2]["content"] for row in sampled["told.jsonl"]]
    assert len(told) == 12 and all(" <rm_score>: " in text for text in told)


FIRST_OF_A_JOB = {
    (example.job, *(flag in example.words for flag in ("--teacher", "--lora-rank", "--load-in-4bit"))): example
    for example in reversed(EXAMPLES)
    if example.job in OFFLINE
}


@pytest.mark.sampled(len(FIRST_OF_A_JOB))
@pytest.mark.parametrize("example", FIRST_OF_A_JOB.values(), ids=lambda example: example.name)
def test_an_example_of_each_job_on_a_dataset_trains(places, tmp_path, example):
    job, *words = places.words(example, sizes=SMALL_JOB)
    config, _ = parse_job(words, OFFLINE[job])
    steps = run_offline(job, config.flat() | {"run_dir": str(tmp_path / "run")}).of("step")
    assert [record["step"] for record in steps] == [1, 2]
    assert all(math.isfinite(record["loss"]) for record in steps)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("algo", ["DR_GRPO", "PPO"])
def test_an_example_of_reinforcement_learning_trains(places, tmp_path, algo):
    from tests.unit.loops.harness import ThreadedRun

    example = next(each for each in EXAMPLES if (each.page, each.job) == ("rl2", "rl") and algo in each.words)
    config, _ = parse(places.words(example, sizes=SMALL_RUN)[1:])
    trace = ThreadedRun(config.flat() | {"run_dir": str(tmp_path / "run")}, score=None).run()
    assert [record["step"] for record in trace.steps] == [1, 2]
    assert len(trace.of("evaluation")) == 2 * (algo == "DR_GRPO")
    assert all(("value_loss" in step) == (algo == "PPO") for step in trace.steps)


@pytest.mark.full
def test_the_example_of_shared_devices_takes_turns(places, tmp_path):
    from coati_rl.work import HandOverWork
    from tests.unit.loops.harness import ThreadedRun

    example = next(each for each in EXAMPLES if "--colocate" in each.words)
    words = places.words(example, sizes=SMALL_RUN)[1:]
    trace = ThreadedRun(parse(words)[0].flat() | {"run_dir": str(tmp_path / "run")}, score=None).run()
    assert [record["step"] for record in trace.steps] == [1, 2]
    assert {work.to for work in trace.work if isinstance(work, HandOverWork)} == {"producers", "trainers"}


@pytest.mark.full
def test_the_example_of_adapters_in_reinforcement_learning_trains(places, tmp_path):
    from tests.unit.loops.harness import ThreadedRun

    example = next(each for each in EXAMPLES if each.page == "verl")
    words = places.words(example, sizes=SMALL_RUN | {"-ed": None, "-ei": None, "-mpt": 512})[1:]
    trace = ThreadedRun(parse(words)[0].flat() | {"run_dir": str(tmp_path / "run")}, score=None).run()
    assert [record["step"] for record in trace.steps] == [1, 2]


def test_each_job_has_an_example():
    of_ours = {"value"}  # whose rows are the rollouts of a run
    assert {example.job for example in EXAMPLES} == {*OFFLINE, "generate", "rl"} - of_ours
