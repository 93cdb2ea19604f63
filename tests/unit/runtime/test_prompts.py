"""The rows of a run's files: whose they are, and what is said of tasks that have none and rows that name none."""

import json

import pytest

import rl_example
from coati_rl.config.cli import build_config
from coati_rl.data.dataset import make_prompts
from coati_rl.data.tasks import Task, TaskRow
from coati_rl.errors import ConfigError
from coati_rl.runtime.prompts import RewardFacts, load_run_rows, make_run_prompts
from rewards.registry import default_system_prompt, needs_ground_truth

FACTS = RewardFacts(default_system_prompt=default_system_prompt, needs_ground_truth=needs_ground_truth)
TASKS = {"math": {"reward_type": "boxed"}, "code": {"reward_type": "code", "system_prompt": "Code."}}
MATH = {"messages": "1+1?", "gt_answer": "2"}
CODE = {"messages": "Print 2.", "test_cases": {"inputs": [""], "outputs": ["2"]}}


@pytest.fixture
def write(tmp_path):
    def make(name, *rows):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return f"{tmp_path}/{name}.jsonl"

    return make


@pytest.fixture
def files(write):
    return {"math": write("math", MATH, MATH), "code": write("code", CODE)}


def rows_of(**values):
    return load_run_rows(build_config(values), FACTS)


def refusal(**values):
    with pytest.raises(ConfigError) as caught:
        rows_of(**values)
    return str(caught.value)


def test_files_of_tasks_are_read_with_their_ground_truths_and_system_prompts(files):
    rows = rows_of(dataset=files, tasks=TASKS, eval_dataset={"math": files["math"]})
    assert rows.num_train == 3
    found = {name: (of_task[0].task.truth, of_task[0].task.system_prompt) for name, of_task in rows.train.items()}
    assert found == {"math": ("gt_answer", default_system_prompt("boxed")), "code": ("test_cases", "Code.")}
    assert [row.task.name for row in rows.evaluation["math"]] == ["math", "math"]


def test_files_may_have_names_without_settings(files):
    rows = rows_of(dataset={"easy": files["math"]}, reward_type="boxed", eval_dataset={"other": files["math"]})
    assert rows.tasks == {"easy", "default"}


def test_an_evaluation_set_of_another_name_has_rows_that_name_their_task(files, write):
    mixed = write("mixed", {**MATH, "task": "math"}, {**CODE, "task": "code"})
    rows = rows_of(dataset=files, tasks=TASKS, eval_dataset={"held out": mixed})
    assert [row.task.name for row in rows.evaluation["held out"]] == ["math", "code"]
    assert "mixed.jsonl, line 1: names no task, and neither does its file" in refusal(
        dataset=files, tasks=TASKS, eval_dataset={"held out": write("mixed", MATH)}
    )


def test_several_sources_have_names_of_their_own_and_a_limit_each(files, write):
    many = ",".join([files["math"], write("more", MATH, MATH, MATH)])
    rows = rows_of(dataset=many, reward_type="boxed", max_samples=2)
    assert {name: len(each) for name, each in rows.train.items()} == {"train": 2, "train:1": 2}
    rows = rows_of(dataset={"math": many, "code": files["code"]}, tasks=TASKS)
    assert {name: len(each) for name, each in rows.train.items()} == {"math": 2, "math:1": 3, "code": 1}
    assert {row.task.name for row in rows.train["math:1"]} == {"math"}
    rows = rows_of(dataset=files["math"], reward_type="boxed", eval_dataset={"all": many}, max_samples=1)
    assert (rows.num_train, len(rows.evaluation["all"])) == (1, 5)


def test_the_column_of_prompts_is_found_or_named(write, tokenizer):
    named = write("named", {"question": "1+1?", "messages": "other", "gt_answer": "2"})
    found = write("found", {"prompt": [{"role": "user", "content": "1+1?"}], "gt_answer": "2"})
    for settings in ({"dataset": named, "prompt_key": "question"}, {"dataset": found}):
        config = build_config({**settings, "reward_type": "boxed"})
        train, _ = make_run_prompts(load_run_rows(config, FACTS), config, tokenizer)
        assert [prompt.text for prompt in train.prompts] == ["1+1?"]
    assert "line 1: has no question; every row needs question (--prompt-key) and gt_answer" in refusal(
        dataset=found, prompt_key="question", reward_type="boxed"
    )


def test_a_template_for_text_takes_the_place_of_the_chat_template_and_the_system_prompt(files, tokenizer):
    config = build_config({"dataset": files["math"], "reward_type": "boxed", "input_template": "Q: {}\nA: "})
    train, _ = make_run_prompts(load_run_rows(config, FACTS), config, tokenizer)
    assert {prompt.rendered for prompt in train.prompts} == {"Q: 1+1?\nA: "}
    assert tokenizer.decode(train.prompts[0].token_ids, skip_special_tokens=True) == "Q: 1+1?\nA: "
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    rows = [TaskRow(fields={"messages": talk}, task=Task(truth=None))]
    with pytest.raises(ConfigError, match="train, prompt 1: has several messages, and --input-template takes"):
        make_prompts(rows, tokenizer, max_prompt_tokens=99, input_template="{}")


def test_a_source_of_which_no_prompt_can_be_used_has_no_share(files, write, tokenizer):
    long = write("long", {**MATH, "messages": "1" * 500})
    config = build_config({"dataset": f"{files['math']}=1,{long}=1", "reward_type": "boxed", "max_prompt_tokens": 400})
    with pytest.raises(ConfigError, match=r"long.jsonl: all its prompts exceed --max-prompt-tokens 400, so that it"):
        make_run_prompts(load_run_rows(config, FACTS), config, tokenizer)


def test_a_task_without_rows_is_refused(files):
    assert refusal(dataset={"math": files["math"]}, tasks=TASKS) == (
        '--tasks code: no row is of this task; give its file with -d code=PATH, rows with "task": "code", or leave the '
        "task out"
    )
    rows_of(dataset={"math": files["math"]}, tasks=TASKS, eval_dataset={"code": files["code"]})


def test_the_command_ends_with_2_and_one_message(files, tmp_path, capsys):
    sizes = "-i 1 -t 1 -g 2 -ibs 2 -imbs 2 -tbs 2 -tMbs 2 -tmbs 4 --device cpu --dry-run"
    argv = ["-m", "a/b", "-d", f"math={files['code']}", "--tasks", json.dumps({"math": TASKS["math"]}), *sizes.split()]
    assert rl_example.main(argv, tmp_path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "code.jsonl, line 1 (task math): has no gt_answer; every row needs messages and gt_answer" in line
