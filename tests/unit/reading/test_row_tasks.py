"""The task of a row: from its file, from its column, and what is said where neither will do."""

import json
from datetime import date

import pytest

from coati_rl.errors import ConfigError
from coati_rl.reading.dataset import json_columns, load_rows, make_prompts
from coati_rl.reading.draw_order import fingerprint
from coati_rl.reading.tasks import RowTasks, Task
from coati_rl.reward_spec import RewardColumns

TASKS = {
    "default": Task(),
    "math": Task(name="math", system_prompt="Box it.", answer_key="solution"),
    "code": Task(name="code", truth="test_cases"),
}
BY_COLUMN = RowTasks(tasks=TASKS, of_file=None, reads_column=True)
MATH = {"messages": "1+1?", "solution": "2", "task": "math"}
CODE = {"messages": "Print 2.", "test_cases": {"inputs": [""], "outputs": ["2"]}, "task": "code"}
PLAIN = {"messages": "3?", "gt_answer": "3"}


@pytest.fixture
def load(tmp_path):
    def make(*rows, tasks=BY_COLUMN, name="a.jsonl"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name).write_text(text)
        return load_rows(str(tmp_path / name), flag="--dataset", tasks=tasks)

    return make


@pytest.fixture
def refusal(load):
    def run(*rows, **options):
        with pytest.raises(ConfigError) as caught:
            load(*rows, **options)
        return str(caught.value)

    return run


def test_rows_of_one_file_are_framed_and_scored_by_their_own_tasks(load, tokenizer):
    prompts = make_prompts(load(MATH, CODE, PLAIN), tokenizer, max_prompt_tokens=100).prompts
    assert [(prompt.uid, prompt.task) for prompt in prompts] == [
        ("train-0", "math"),
        ("train-1", "code"),
        ("train-2", "default"),
    ]
    assert [prompt.rendered.startswith("s:Box it.") for prompt in prompts] == [True, False, False]
    assert [prompt.ground_truth for prompt in prompts] == ["2", '{"inputs": [""], "outputs": ["2"]}', "3"]
    assert [prompt.problem.task for prompt in prompts] == ["math", "code", "default"]


def test_a_csv_names_tasks_too(tmp_path):
    (tmp_path / "a.csv").write_text("messages,solution,gt_answer,task\n1+1?,2,,math\n3?,,3,\n")
    rows = load_rows(str(tmp_path / "a.csv"), flag="--dataset", tasks=BY_COLUMN)
    assert [row.task.name for row in rows] == ["math", "default"]


def test_the_column_means_nothing_in_a_run_that_defines_no_tasks(load):
    (row,) = load({**PLAIN, "task": ["of", "another", "kind"]}, tasks=RowTasks(tasks={"default": Task()}))
    assert row.task.name == "default"


def test_an_unknown_task_and_one_that_contradicts_its_file_are_named_with_their_line(refusal):
    assert refusal(MATH, {**PLAIN, "task": "maths"}).endswith(
        "a.jsonl, line 2: its task 'maths' is not defined; use one of default, math, code, or define it (--tasks)"
    )
    of_math = RowTasks(tasks=TASKS, of_file="math", reads_column=True)
    assert refusal(MATH, CODE, tasks=of_math).endswith(
        "a.jsonl, line 2: its task is 'code', and its file is given for 'math'; correct one of them"
    )
    unnamed = RowTasks(tasks=TASKS, of_file=None, reads_column=True, needs_name=True)
    assert "line 1: names no task, and neither does its file" in refusal(PLAIN, tasks=unnamed)


def test_a_row_that_lacks_its_tasks_ground_truth_is_named_with_the_task(refusal):
    assert "line 2 (task code): has no test_cases; every row needs messages and test_cases" in refusal(
        MATH, {**MATH, "task": "code"}
    )
    assert "line 1 (task math): has no solution" in refusal({**PLAIN, "task": "math"})


def test_a_row_of_another_task_makes_another_dataset(load, tokenizer):
    both = {"messages": "1?", "gt_answer": "1", "solution": "1"}
    tasks = RowTasks(tasks={**TASKS, "math": Task(name="math")}, of_file=None, reads_column=True)
    digests = {
        fingerprint(make_prompts(load({**both, **task}, tasks=tasks), tokenizer, max_prompt_tokens=100).prompts)
        for task in ({}, {"task": "math"})
    }
    assert len(digests) == 2


def test_a_row_keeps_its_columns_where_its_tasks_reward_reads_them(load, tokenizer):
    reads = Task(truth=None, columns=RewardColumns(required=("level",), are_kept=True))
    tasks = RowTasks(tasks={"default": reads})
    (prompt,) = make_prompts(load({**PLAIN, "level": 3}, tasks=tasks), tokenizer, max_prompt_tokens=100).prompts
    assert prompt.problem.columns == {**PLAIN, "level": 3}
    (other,) = make_prompts(load({**PLAIN, "level": 3}), tokenizer, max_prompt_tokens=100).prompts
    assert other.columns == {}, "nothing is kept in vain"


def test_a_row_without_a_column_that_a_function_takes_is_named(refusal):
    tasks = RowTasks(tasks={"default": Task(truth=None, columns=RewardColumns(required=("level",), are_kept=True))})
    message = refusal({**PLAIN, "level": 3}, PLAIN, tasks=tasks)
    assert "line 2: has no column level, which the function of --reward-type takes; add it to the row, or " in message


def test_dates_of_a_row_are_text_for_the_reward():
    assert json_columns({"day": date(2024, 5, 1), "n": 1}) == {"day": "2024-05-01", "n": 1}
