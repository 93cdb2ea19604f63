"""The rows of a run's files: whose they are, and what is said of tasks that have none and rows that name none."""

import json
import pickle

import pytest

import rl_example
from coati_rl.config.cli import build_config
from coati_rl.errors import ConfigError
from coati_rl.preflight.prompts import RewardFacts, load_run_rows, make_run_prompts, make_source
from coati_rl.reading.dataset import make_prompts
from coati_rl.reading.tasks import Task, TaskRow
from rewards.registry import columns_of, default_system_prompt, needs_ground_truth

FACTS = RewardFacts(default_system_prompt=default_system_prompt, needs_ground_truth=needs_ground_truth)
TASKS = {"math": {"reward_type": "boxed"}, "code": {"reward_type": "code", "system_prompt": "Code."}}
MATH = {"messages": "1+1?", "gt_answer": "2"}
CODE = {"messages": "Print 2.", "test_cases": {"inputs": [""], "outputs": ["2"]}}


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


SUMS = "reasoning_gym:chain_sum?min_terms=2&max_terms=2"
FACTS_OF_COLUMNS = RewardFacts(
    default_system_prompt=default_system_prompt, needs_ground_truth=needs_ground_truth, columns_of=columns_of
)


def source_of(tokenizer, **values):
    config = build_config({"max_prompt_tokens": 1000, "max_steps": 5, **values})
    rows = load_run_rows(config, FACTS_OF_COLUMNS)
    train, evaluation = make_run_prompts(rows, config, tokenizer)
    return make_source(rows, config, tokenizer, train), evaluation


def test_generated_rows_are_prompts_with_the_system_prompt_and_the_data_of_their_verifier(tokenizer):
    source, _ = source_of(tokenizer, dataset=SUMS)
    prompt = source.draw(3)
    assert (prompt.uid, prompt.task, prompt.messages[0]["role"]) == ("train-3.0", "reasoning_gym", "system")
    assert "<answer>answer here</answer>" in prompt.messages[0]["content"]
    assert prompt.text.startswith("State the final answer to the following arithmetic problem: ")
    left, operator, right = prompt.text.partition(": ")[2].removesuffix(" =").split()
    assert int(prompt.ground_truth) == int(left) + (int(right) if operator == "+" else -int(right))
    assert prompt.columns["metadata"]["source_dataset"] == "chain_sum"
    assert prompt.columns["parameters"] == {"min_terms": 2, "max_terms": 2}
    assert source_of(tokenizer, dataset=SUMS, seed=1)[0].draw(3).text != prompt.text


def test_generated_rows_are_mixed_with_those_of_files_by_shares(files, tokenizer):
    source, _ = source_of(tokenizer, dataset=f"{SUMS}=1,{files['math']}=1", reward_type="boxed", prompt_key="messages")
    drawn = [source.draw(number) for number in range(8)]
    assert [prompt.task for prompt in drawn].count("reasoning_gym") == 4
    assert {prompt.uid for prompt in drawn if prompt.task == "default"} == {
        f"train:1-{row}.{passed}" for row in (0, 1) for passed in (0, 1)
    }
    assert all(not prompt.columns for prompt in drawn if prompt.task == "default")
    in_another_process = pickle.loads(pickle.dumps(source))
    assert [in_another_process.draw(number) for number in range(8)] == drawn


def test_an_evaluation_set_has_as_many_rows_as_its_size_and_is_the_same_in_every_run(files, tokenizer):
    values = {"dataset": files["math"], "reward_type": "boxed", "eval_dataset": {"sums": f"{SUMS}&size=3"}}
    (_, first), (_, second) = (source_of(tokenizer, **values, seed=seed) for seed in (0, 1))
    assert first == second and [prompt.uid for prompt in first["sums"].prompts] == ["sums-0", "sums-1", "sums-2"]
    trained = source_of(tokenizer, dataset=SUMS)[0]
    assert not {prompt.text for prompt in first["sums"].prompts} & {trained.draw(number).text for number in range(9)}


def test_a_task_may_score_generated_rows_in_another_way(tokenizer):
    tasks = {"sums": {"reward_type": "boxed"}}
    source, _ = source_of(tokenizer, dataset={"sums": SUMS}, tasks=tasks, answer_key="other")
    assert "\\boxed{}" in source.draw(0).messages[0]["content"] and source.draw(0).ground_truth.lstrip("-").isdigit()


def test_a_generator_that_is_unknown_or_too_long_is_refused_before_anything_starts(tokenizer):
    assert "chain_sun: no such generator; use chain_sum" in refusal(dataset="reasoning_gym:chain_sun")
    with pytest.raises(
        ConfigError, match=r"--dataset reasoning_gym:chain_sum: 16 rows were made .* --max-prompt-tokens"
    ):
        source_of(tokenizer, dataset=SUMS, max_prompt_tokens=9)


def test_the_command_plans_a_run_on_generated_rows(tmp_path, capsys):
    sizes = "-i 1 -t 1 -g 2 -ibs 2 -imbs 2 -tbs 2 -tMbs 2 -tmbs 4 --device cpu --dry-run -m a/b"
    assert rl_example.main(["-d", SUMS, "--max-steps", "7", *sizes.split()], tmp_path) == 0
    assert "prompts                 endless\noptimizer steps         7" in capsys.readouterr().out
    assert rl_example.main(["-d", f"{SUMS}&terms=3", "--max-steps", "7", *sizes.split()], tmp_path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "chain_sum has no parameter terms; use min_terms or max_terms" in line
