"""Run jobs on a dataset as a user types them: records, checkpoints, exit codes, kills, interrupts, layouts."""

import json
import re
import shlex
import signal

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.integration.runs.conftest import ROOT, Run
from tests.integration.runs.test_turns import numbers, one_core  # noqa: F401, a fixture

NUM_ROWS = 64


class JobRun(Run):
    """A job on a dataset."""

    program = ("-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); from coati_rl.command_line import main; "
                     "sys.exit(main())")  # fmt: skip


@pytest.fixture(scope="session")
def run_class():
    return JobRun


@pytest.fixture(scope="session")
def rows(make_tiny, tmp_path_factory):
    """(job, number of rows) -> a file of rows: of questions to which 1 is the answer."""
    questions = [
        json.loads(line)["messages"] for line in (make_tiny(tied=True) / "train.jsonl").read_text().split("\n")[:-1]
    ]
    questions = [each[0]["content"] if isinstance(each, list) else each["content"] for each in questions]

    def row(job, number):
        prompt, right, wrong = questions[number], "\\boxed{1}", f"\\boxed{{{2 + number % 2}}}"
        if job == "sft":
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": right}]
            return {"messages": turns}
        if job == "kto":
            return {"prompt": prompt, "completion": (right, wrong)[number % 2], "label": number % 2 == 0}
        return {"prompt": prompt, "chosen": right, "rejected": wrong}

    def write(job, first, number):
        path = tmp_path_factory.mktemp("rows") / f"{job}.jsonl"
        path.write_text("".join(json.dumps(row(job, first + each)) + "\n" for each in range(number)))
        return path

    return write


@pytest.fixture(scope="session")
def job_flags(make_tiny, rows):
    """(job, trainers) -> flags of a job of 4 steps an epoch, with a checkpoint and an evaluation every 4."""

    def make(job, *, trainers=1, dp=1, epochs=2):
        base = {
            "-m": make_tiny(tied=True),
            "-d": rows(job, 0, NUM_ROWS),
            "-ed": rows(job, NUM_ROWS, 16),
            "-t": trainers,
            "-tbs": 16 // dp,
            "-tmbs": 4,
            "-e": epochs,
            "-ei": 4,
            "-si": 4,
            "-lr": 1e-3,
            "--device": "cpu",
        }
        return [job, *(part for pair in base.items() for part in pair)]

    return make


def evaluations(run):
    return [json.loads(line) for line in (run.run_dir / "eval" / "summary.jsonl").read_text().split("\n")[:-1]]


def tensors(run, step):
    files = sorted((run.run_dir / "checkpoints" / f"step-{step}").glob("*.safetensors"))
    return {path.name: path.read_bytes() for path in files}


@pytest.mark.full
def test_sft_trains_evaluates_saves_and_leaves_nothing(start_run, job_flags):
    run = start_run(*job_flags("sft", epochs=1), "--max-steps", 3, "-si", 2)
    assert run.wait() == 0, run.text()
    assert [record["step"] for record in run.records()] == [1, 2, 3]
    losses = [each["loss"] for each in evaluations(run)]
    assert [each["step"] for each in evaluations(run)] == [0, 3] and losses[1] < losses[0]
    AutoModelForCausalLM.from_pretrained(run.run_dir / "checkpoints" / "step-3")
    assert "started early" in (run.run_dir / "logs" / "driver.log").read_text(), "in a process of its own, without Ray"
    assert (run.run_dir / "timeline.json").is_file() and list((run.run_dir / "tensorboard").iterdir())
    assert run.text().splitlines()[-1].startswith("done: ")
    assert "; to train on, raise --max-epochs or --max-steps: coati-rl sft --config " in run.text()
    assert run.left_over() == []


def killed_and_resumed(start_run, job, flags):
    """(a whole run, one whose trainers were killed and that went on by the command that it printed): 40 steps."""
    whole = start_run(*flags, name="whole")
    killed = start_run(*flags, name="killed")
    killed.wait_for_step(5)
    for process in killed.processes("local_trainer"):
        process.kill()
    assert killed.wait() == 1, killed.text()
    last = killed.text().splitlines()[-1]
    resume = re.search(rf"; resume from step (\d+) with: coati-rl ({job} .*)$", last)
    assert resume and int(resume[1]) in range(4, 40, 4), last
    assert whole.wait() == 0, whole.text()
    resumed = start_run(*shlex.split(resume[2]), name="killed")
    assert resumed.wait() == 0, resumed.text()
    return whole, resumed


@pytest.mark.full
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("job", ["sft", "rm", "dpo", "kto"])
def test_a_job_that_is_killed_goes_on_to_the_same_bits(start_run, job_flags, job, dp):
    own = ["--precompute-reference"] if job == "dpo" else []
    flags = [*job_flags(job, trainers=dp, dp=dp, epochs=10), *own]  # 40 steps: seconds, in which it can be killed
    whole, resumed = killed_and_resumed(start_run, job, flags)
    assert tensors(resumed, 40) == tensors(whole, 40) and tensors(whole, 40)
    assert [record["step"] for record in resumed.records()] == list(range(1, 41))
    assert evaluations(resumed) == evaluations(whole)
    assert resumed.left_over() == []


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_job_is_saved_and_its_last_line_resumes_it(start_run, job_flags, number):
    run = start_run(*job_flags("sft", epochs=200), "-si", -1, "-ei", -1)
    run.wait_for_step(3)
    run.processes()
    run.process.send_signal(number)
    assert run.wait(60) == 130, run.text()
    assert run.left_over() == []
    match = re.search(r"; resume from step (\d+) with: coati-rl (.*)$", run.text().splitlines()[-1])
    assert match, run.text()
    step = int(match[1])
    assert len(run.records()) == step
    resumed = start_run(*shlex.split(match[2]), "--max-steps", step + 2)
    assert resumed.wait() == 0, resumed.text()
    assert [record["step"] for record in resumed.records()] == list(range(1, step + 3))


@pytest.mark.full
@pytest.mark.parametrize("job", ["sft", "rm", "kto"])
def test_a_job_has_the_same_losses_in_other_layouts_and_goes_on_from_one_in_another(start_run, job_flags, job):
    one = start_run(*job_flags(job), name="one")
    assert one.wait() == 0, one.text()
    split = start_run(*job_flags(job, trainers=4), "-tp", 2, "-pp", 2, name="split")
    assert split.wait() == 0, split.text()
    middle = split.run_dir / "checkpoints" / "step-4"
    resumed = start_run(*job_flags(job, trainers=2, dp=2), "-cp", middle, name="split")
    assert resumed.wait() == 0, resumed.text()
    losses = [[record["loss"] for record in run.records()] for run in (one, resumed)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    if job == "rm":
        model = AutoModelForSequenceClassification.from_pretrained(resumed.run_dir / "checkpoints" / "step-8")
        assert model.num_labels == 1


@pytest.mark.full
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("trainers", [1, 2])
def test_a_dpo_job_whose_reference_is_apart_has_the_numbers_of_one_that_holds_it(start_run, job_flags, trainers):
    found = []
    for name, more in {"held": (), "apart": ("--ref-devices", 1)}.items():
        run = start_run(*job_flags("dpo", trainers=trainers, dp=trainers, epochs=1), *more, name=name)
        assert run.wait() == 0, run.text()
        found.append((tensors(run, 4), numbers(run), evaluations(run)))
        assert run.left_over() == []
    assert found[0] == found[1]
    assert all(found[0])
