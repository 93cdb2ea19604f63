"""Run the commands of docs/coming_from beside other projects' printed examples, as a user does, on tiny models."""

import json
import subprocess
import sys

import pytest

from coati_rl.config.commands import OFFLINE
from tests.integration.runs.conftest import ROOT, Run
from tests.printed_examples import (
    Places,
    read_examples,
    served_rewards,
    with_step_token,
    write_experts,
    write_reward_model,
)

pytestmark = pytest.mark.full

EXAMPLES = read_examples()
JOB_SIZES = {"--device": "cpu", "-t": 2, "-tbs": 2, "-tmbs": 1, "--max-length": 256, "-e": 1, "--max-steps": 2}
SAMPLE_SIZES = {
    "--device": "cpu", "-b": "transformers", "-ptp": None, "-mpt": 128, "-mnt": 16, "-imbs": 4, "--max-samples": 12,
}  # fmt: skip
RUN_SIZES = {
    "--device": "cpu", "-b": "transformers", "-ptp": None, "-i": 1, "-t": 2, "-ibs": 4, "-imbs": 4, "-tbs": 2,
    "-tMbs": 2, "-tmbs": 1, "-mpt": 128, "-mnt": 16, "-e": 1, "--max-steps": 2, "--master_port": 0,
}  # fmt: skip


class Command(Run):
    """Any command of coati-rl."""

    program = ("-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); from coati_rl.command_line import main; "
                     "sys.exit(main())")  # fmt: skip


@pytest.fixture(scope="session")
def run_class():
    return Command


@pytest.fixture(scope="module")
def places(make_tiny, tmp_path_factory):
    directory = tmp_path_factory.mktemp("examples")
    policy = with_step_token(make_tiny(tied=True), directory / "policy")
    experts = write_experts(policy, directory / "experts")
    judge = write_reward_model(policy, directory / "judge")
    with served_rewards() as url:
        yield Places(directory, policy, experts, judge, url, num_rows=24)


@pytest.fixture(scope="module")
def sampled(places):
    """Run the examples of batch inference, whose rows later examples read."""
    for example in (each for each in EXAMPLES if each.job == "generate"):
        command = [sys.executable, *Command.program, *places.words(example, sizes=SAMPLE_SIZES)]
        done = subprocess.run(command, cwd=places.directory, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert "done: " in done.stdout


@pytest.mark.parametrize("example", [each for each in EXAMPLES if each.job in OFFLINE], ids=lambda each: each.name)
def test_an_example_of_a_job_on_a_dataset_ends_with_a_model(start_run, places, sampled, example):
    # Two trainers are one copy, of -tp 2, or share rows.
    of_two = {"--fsdp-size": 1, "--context-parallel": 2}
    layout = {flag: value for flag, value in of_two.items() if flag in example.words}
    run = start_run(*places.words(example, sizes=JOB_SIZES | layout | {"--run-dir": None}))
    assert run.wait() == 0, run.text()
    assert [record["step"] for record in run.records()] == [1, 2]
    weights = "adapter_config.json" if "--lora-rank" in example.words else "config.json"
    assert (run.run_dir / "checkpoints" / "step-2" / weights).is_file()
    if merge := next((each for each in EXAMPLES if each.job == "merge" and each.words[2] in example.words), None):
        out = places.directory / merge.words[3]
        # Not in bf16: what two steps have learned is less than it rounds, which is refused.
        command = [*Command.program, "merge", str(places.model), str(run.run_dir), str(out), "--precision", "fp32"]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert json.loads((out / "config.json").read_text())["architectures"] == ["Qwen3ForSequenceClassification"]


@pytest.mark.parametrize("example", [each for each in EXAMPLES if each.job == "rl"], ids=lambda each: each.name)
def test_an_example_of_reinforcement_learning_ends_with_a_model(start_run, places, example):
    group_size = int(example.words[example.words.index("-g") + 1])
    sizes = RUN_SIZES | {"-g": min(4, group_size), "--save-dir": None}
    if "--lora-sync" in example.words:
        sizes["-b"] = "vllm"  # which alone computes with adapters
    run = start_run(*places.words(example, sizes=sizes))
    assert run.wait() == 0, run.text()
    assert [record["step"] for record in run.records()] == [1, 2]
    weights = "adapter_config.json" if "--lora-rank" in example.words else "config.json"
    assert (run.run_dir / "checkpoints" / "step-2" / weights).is_file()
