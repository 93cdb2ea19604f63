"""A run with three tasks: each row is framed, sampled, scored and reported as its task says, and trained as it was
sampled.

The part of a test's name before two underscores is the field (see test_flags.py).
"""

import json

import pytest
import torch

from tests.metric_names import OF_A_TASK

TASKS = {
    "math": {"reward_type": "boxed", "system_prompt": "Box it.", "temperature": 0.8, "stop": ["%"]},
    "code": {"reward_type": "code", "max_new_tokens": 8},
    "style": {"reward_type": "<own>", "system_prompt": "", "temperature": 1.3, "correct_from": 0.5},
}
OWN = "def score(response):\n    return {'reward': len(response) % 2 / 2, 'vowels': 1.0}\n"
ROWS = {
    "math": {"gt_answer": "4"},
    "code": {"test_cases": {"inputs": ["1"], "outputs": ["1"]}},
    "style": {},
}
NAMES = [*TASKS]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def three_tasks(tmp_path_factory):
    """The fields of a run of three tasks, four rows of each in a file of its own; the transformers engine."""
    directory = tmp_path_factory.mktemp("tasks")
    (directory / "mine.py").write_text(OWN)
    rows = {name: [{"messages": f"{name}{i}", **ROWS[name]} for i in range(4)] for name in NAMES}
    files = {name: write(directory / f"{name}.jsonl", rows[name]) for name in NAMES}
    style = TASKS["style"] | {"reward_type": f"{directory}/mine.py:score"}
    return {
        "backend": "transformers",
        "dataset": files,
        "eval_dataset": {"math": files["math"], "style": files["style"]},
        "tasks": TASKS | {"style": style},
        "temperature": 1.0,
        "system_prompt": "All.",
        "eval_interval": 4,
        "save_interval": 1,
        "inference_batch_size": 3,
        "inference_microbatch_size": 3,
        "train_batch_size": 3,
        "train_minibatch_size": 3,
        "train_microbatch_size": 6,
    }


@pytest.fixture(scope="module")
def whole(run_in_threads, three_tasks):
    return run_in_threads(three_tasks, score=None)


def lines_of(directory):
    return [json.loads(line) for file in sorted(directory.glob("*step*.jsonl")) for line in file.open()]


@pytest.mark.full
def test_tasks__decide_how_their_rows_are_framed_and_sampled(whole):
    leases = {lease.prompt.uid.partition(".")[0]: lease for lease in whole.leases if lease.prompt.purpose == "train"}
    assert sorted(leases) == sorted(f"{name}-{i}" for name in NAMES for i in range(4))
    framed = {name: leases[f"{name}-0"].prompt.rendered for name in NAMES}
    assert framed == {
        "math": "s:Box it.\nu:math0\na:",
        "code": "s:All.\nu:code0\na:",  # the run's own
        "style": "u:style0\na:",
    }
    drawn = {name: leases[f"{name}-0"].sampling for name in NAMES}
    assert [drawn[name].temperature for name in NAMES] == [0.8, 1.0, 1.3]
    assert [drawn[name].max_new_tokens for name in NAMES] == [16, 8, 16]
    assert [drawn[name].stop for name in NAMES] == [("%",), (), ()]
    of_evaluation = [lease.sampling for lease in whole.leases if lease.prompt.uid == "math-0"]
    assert {(each.temperature, each.stop) for each in of_evaluation} == {(0.0, ("%",))}


def test_each_task_has_figures_of_its_own_under_the_same_keys_in_every_record(whole):
    lines = lines_of(whole.paths.rollouts)
    assert {line["task"] for line in lines} == set(NAMES)
    for record in whole.steps:
        assert {f"{key}/{name}" for key in OF_A_TASK for name in NAMES} <= set(record)
        for name in NAMES:
            of_task = [line for line in lines if line["step"] == record["step"] and line["task"] == name]
            if not of_task:
                assert {record[f"{key}/{name}"] for key in OF_A_TASK} == {None}
                continue
            num = len(of_task)
            assert record[f"reward_mean/{name}"] == pytest.approx(sum(line["reward"] for line in of_task) / num)
            assert record[f"answer_accuracy/{name}"] == sum(line["answer_correct"] for line in of_task) / num
            assert record[f"response_tokens_mean/{name}"] == sum(line["num_tokens"] for line in of_task) / num
    own = [line for line in lines if line["task"] == "style"]
    assert {(line["reward"], line["answer_correct"]) for line in own} <= {(0.0, False), (0.5, True)}
    assert {line["verdict"] for line in lines} <= {"ok", "wrong"}, "each is scored by its task's reward"


def test_an_evaluation_is_scored_by_its_tasks_reward(whole):
    lines = [json.loads(line) for line in (whole.paths.evaluation / "style-step-000004.jsonl").open()]
    assert all(line["answer_correct"] == (len(line["response"]) % 2 == 1) for line in lines)
    accuracy = {(event["step"], event["task"]): event["accuracy"] for event in whole.of("evaluation")}
    assert accuracy[4, "style"] == sum(line["answer_correct"] for line in lines) / 4


def test_the_trainer_divides_the_logits_of_each_token_by_its_own_tasks_temperature(whole):
    """Else its log-probabilities would be apart from the engine's by the tenths of a nat that a temperature makes."""
    assert [record["logprob_gap_max"] < 1e-4 for record in whole.steps] == [True] * 4
    assert {g.temperature for g in whole.groups if g.prompt.purpose == "train"} == {0.8, 1.0, 1.3}
    assert any(gradient["model.norm.weight"].abs().sum() > 0 for gradient in whole.gradients)


@pytest.mark.full
def test_a_run_of_three_tasks_resumes_to_the_same_bits(run_in_threads, three_tasks):
    three_tasks = {**three_tasks, "backend": "fake"}
    whole = run_in_threads(three_tasks, score=None)
    checkpoint = whole.paths.checkpoints / "step-2"
    resumed = run_in_threads({**three_tasks, "checkpoint_path": str(checkpoint)}, score=None)
    assert resumed.prepared.resume.changes == ()
    assert [record["step"] for record in resumed.steps] == [3, 4]
    for name, weight in whole.weights.items():
        assert torch.equal(weight, resumed.weights[name]), name


def test_rows_that_name_their_task_are_the_same_run_as_files_that_do(whole, run_in_threads, three_tasks, tmp_path):
    rows = []
    for name, path in three_tasks["dataset"].items():
        with open(path, encoding="utf-8") as file:
            rows += [{**json.loads(line), "task": name} for line in file]
    settings = {**three_tasks, "dataset": write(tmp_path / "all.jsonl", rows), "max_steps": 1, "eval_interval": -1}
    trace = run_in_threads(settings, score=None)
    framed = {(lease.prompt.task, lease.prompt.rendered) for lease in whole.leases if lease.prompt.purpose == "train"}
    assert {(lease.prompt.task, lease.prompt.rendered) for lease in trace.leases} <= framed
    assert {lease.prompt.uid.partition("-")[0] for lease in trace.leases} == {"train"}


def test_correct_from__is_the_reward_from_which_an_answer_is_right(run_in_threads, three_tasks):
    settings = {"reward_type": three_tasks["tasks"]["style"]["reward_type"], "max_steps": 1}
    (strict,), (lenient,) = (
        run_in_threads({**settings, "correct_from": least}, score=None).steps for least in (1.0, 0.5)
    )
    assert strict["reward_mean"] == lenient["reward_mean"] > 0
    assert (strict["answer_accuracy"], lenient["answer_accuracy"]) == (0.0, 2 * lenient["reward_mean"])
    assert not any(key.endswith("/default") for key in strict), "one task has no figures of its own"
