"""Prompts as other systems write them: with solutions, parts, ShareGPT, variables; and rows without a prompt."""

import json
from copy import copy

import pytest

from coati_rl.config.cli import build_config
from coati_rl.errors import ConfigError
from coati_rl.preflight.prompts import RewardFacts, load_run_rows
from coati_rl.reading.dataset import load_rows, make_prompts
from coati_rl.reading.tasks import RowTasks, Task

ASKED = {"messages": {"role": "user", "content": "1+1?"}, "gt_answer": "2"}


def loaded(path, **of_task):
    return load_rows(path, flag="--dataset", tasks=RowTasks(tasks={"default": Task(**of_task)}))


def refusal(path, **of_task):
    with pytest.raises(ConfigError) as caught:
        loaded(path, **of_task)
    return str(caught.value)


def prompts_of(rows, tokenizer):
    return make_prompts(rows, tokenizer, max_prompt_tokens=1000).prompts


SOLVED = [{"role": "user", "content": "0+1?"}, {"role": "assistant", "content": "It is \\boxed{1}."}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": SOLVED, "problem": "0+1?", "gt_answer": "1"},
        {"messages": json.dumps(SOLVED), "problem": "0+1?", "gt_answer": "1"},
        {"prompt": [*SOLVED, *SOLVED], "problem": "0+1?", "gt_answer": "1"},
        {"messages": SOLVED[1], "problem": "0+1?", "gt_answer": "1"},
        {"messages": [SOLVED[0], {"role": "assistant", "tool_calls": [{}]}], "problem": "0+1?", "gt_answer": "1"},
        {"conversations": [{"from": "gpt", "value": "1"}], "problem": "0+1?", "gt_answer": "1"},
    ],
)
def test_a_prompt_that_ends_with_the_assistants_answer_is_refused(row, write, tokenizer):
    path = write("a.jsonl", [ASKED, row])
    name = next(iter(row))
    assert refusal(path) == (
        f"--dataset {path}, line 2: {name} ends with a turn of the assistant, which the policy would read before it "
        "answers; leave that message out of the row, or name the column with the question alone by --prompt-key "
        f"COLUMN (its columns are {name}, problem, gt_answer)"
    )
    rows = loaded(write("b.jsonl", [row]), prompt_key="problem")
    assert [prompt.text for prompt in prompts_of(rows, tokenizer)] == ["0+1?"]


def test_examples_before_the_users_last_message_stay(write, tokenizer):
    row = {"messages": [*SOLVED, {"role": "user", "content": "1+1?"}], "gt_answer": "2"}
    (prompt,) = prompts_of(loaded(write("a.jsonl", [row])), tokenizer)
    assert prompt.rendered == "u:0+1?\na:It is \\boxed{1}.\nu:1+1?\na:"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_parts_and_turns_of_sharegpt_are_prompts_in_every_format(name, write, tokenizer):
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "+1?"}]
    rows = [
        {"messages": [{"role": "user", "content": parts}], "gt_answer": "2"},
        {"conversations": [{"from": "human", "value": "1\n+1?"}], "gt_answer": "2"},
    ]
    rows = [{"messages": "" if name == "a.csv" else None, "conversations": None, **row} for row in rows]
    prompts = prompts_of(loaded(write(name, rows)), tokenizer)
    assert [prompt.messages for prompt in prompts] == [({"role": "user", "content": "1\n+1?"},)] * 2


def test_a_row_without_a_prompt_names_its_columns_and_the_flag(write):
    path = write("a.jsonl", [{"question": "1+1?", "answer": "2"}])
    assert refusal(path) == (
        f"--dataset {path}, line 1: has no messages; every row needs messages and gt_answer. Its columns are question, "
        "answer: name the one with the prompt by --prompt-key COLUMN"
    )
    assert len(loaded(path, prompt_key="question")) == 1


def test_variables_of_a_row_go_to_the_chat_template(write, tokenizer):
    speaking = copy(tokenizer)
    speaking.chat_template = "{{ 'quiet ' if quiet }}" + tokenizer.chat_template
    rows = [ASKED, {**ASKED, "chat_template_kwargs": {"quiet": True}}]
    prompts = prompts_of(loaded(write("a.jsonl", rows)), speaking)
    assert [prompt.rendered for prompt in prompts] == ["u:1+1?\na:", "quiet u:1+1?\na:"]
    rows[1]["chat_template_kwargs"] = {"tokenize": True}
    with pytest.raises(ConfigError, match=r"train, prompt 2: chat_template_kwargs sets tokenize, which is not"):
        prompts_of(loaded(write("b.jsonl", rows)), speaking)


def test_variables_are_refused_where_later_turns_are_rendered_without_them(write):
    facts = RewardFacts(default_system_prompt=lambda _: "", needs_ground_truth=lambda _: False)
    path = write("a.jsonl", [{**ASKED, "chat_template_kwargs": {"quiet": True}}])
    alone = {"reward_type": "boxed", "dataset": path}
    assert load_run_rows(build_config(alone), facts).num_train == 1
    for environment in ({"env": "own.py:Game"}, {"agent_command": "python agent.py"}):
        with pytest.raises(
            ConfigError, match=r"line 1: has chat_template_kwargs, which the turns of an environment or"
        ):
            load_run_rows(build_config(alone | environment), facts)


@pytest.mark.parametrize(
    ("tests", "cause"),
    [
        ('{"inputs": ["bad \\ud83d"], "outputs": ["1"]}', r"test_cases inputs holds \ud83d, half of a surrogate pair"),
        ('{"fn_name": "f", "outputs": [1], "inputs": ' + "[" * 200 + "]" * 200 + "}", "test_cases is nested more than"),
        ('{"fn_name": "f", "inputs": [1], "outputs": [' + "7" * 5000 + "]}", "test_cases holds an integer of more"),
    ],
)
def test_tests_that_nothing_can_use_are_named(write, tests, cause):
    path = write("a.jsonl", [{"messages": "hi", "test_cases": tests}])
    assert refusal(path, truth="test_cases").startswith(f"--dataset {path}, line 1: {cause}")
