"""Test files of prompts: five formats with one content, and the messages for wrong files."""

import json

import pytest

from coati_rl.errors import ConfigError
from coati_rl.reading.dataset import load_rows, make_prompts
from coati_rl.reading.tasks import RowTasks, Task, TaskRow

ROWS = [
    {"messages": {"role": "user", "content": "1+1?"}, "gt_answer": "2"},
    {"messages": {"role": "user", "content": 'Say "half", please,\nin LaTeX'}, "gt_answer": "\\frac{1}{2}"},
]


@pytest.fixture
def text_file(tmp_path):
    def write_text(name, text):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write_text


@pytest.fixture
def prompts_of(tokenizer):
    def make(rows, *, max_prompt_tokens=1000, name="train", purpose="train", **of_task):
        """Rows as they are, of the task that the options make; or as they were loaded."""
        task = Task(**of_task)
        rows = [row if isinstance(row, TaskRow) else TaskRow(fields=row, task=task) for row in rows]
        return make_prompts(rows, tokenizer, max_prompt_tokens=max_prompt_tokens, name=name, purpose=purpose)

    return make


def one_task(**settings):
    return RowTasks(tasks={"default": Task(**settings)})


def refusal(path):
    with pytest.raises(ConfigError) as caught:
        load_rows(path, flag="--dataset")
    return str(caught.value)


def row_line(messages='{"role": "user", "content": "hi"}', gt_answer='"4"'):
    return f'{{"messages": {messages}, "gt_answer": {gt_answer}}}\n'


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.arrow"])
def test_every_format_gives_the_same_prompts(write, prompts_of, name):
    prompts = prompts_of(load_rows(write(name, ROWS), flag="--dataset")).prompts
    assert [(prompt.text, prompt.ground_truth) for prompt in prompts] == [
        ("1+1?", "2"),
        ('Say "half", please,\nin LaTeX', "\\frac{1}{2}"),
    ]
    assert [prompt.uid for prompt in prompts] == ["train-0", "train-1"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.arrow"])
def test_a_number_may_be_the_answer(write, prompts_of, name):
    rows = load_rows(write(name, [{**ROWS[0], "gt_answer": 42}, {**ROWS[0], "gt_answer": 0}]), flag="--dataset")
    assert [prompt.ground_truth for prompt in prompts_of(rows).prompts] == ["42", "0"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.arrow"])
@pytest.mark.parametrize("as_text", [False, True])
def test_tests_stand_in_the_place_of_an_answer_in_every_format(write, prompts_of, name, as_text):
    tests = [
        {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]},
        {"inputs": ["[1, 2]"], "outputs": ["3"], "fn_name": "add"},
    ]
    rows = [{**ROWS[0], "test_cases": json.dumps(each) if as_text else each} for each in tests]
    del rows[1]["gt_answer"]  # where it is given it does not count
    loaded = load_rows(write(name, rows), flag="--dataset", tasks=one_task(truth="test_cases"))
    prompts = prompts_of(loaded).prompts
    assert [json.loads(prompt.ground_truth) for prompt in prompts] == tests


def test_a_row_needs_no_ground_truth_where_a_function_of_ones_own_scores_it(write, prompts_of):
    rows = [{"messages": ROWS[0]["messages"]}, ROWS[0]]
    loaded = load_rows(write("a.jsonl", rows), flag="--dataset", tasks=one_task(truth=None))
    assert [prompt.ground_truth for prompt in prompts_of(loaded).prompts] == ["", "2"]


def test_answers_of_a_json_file_may_be_text_and_numbers(write, prompts_of):
    rows = load_rows(write("a.json", [{**ROWS[0], "gt_answer": 0.5}, ROWS[1]]), flag="--dataset")
    assert [prompt.ground_truth for prompt in prompts_of(rows).prompts] == ["0.5", "\\frac{1}{2}"]


def test_a_csv_may_hold_plain_text_as_the_users_message_and_is_never_read_as_numbers(text_file, prompts_of):
    rows = load_rows(text_file("a.csv", "messages,gt_answer\nHow many?,3.10\n12,NA\n"), flag="--dataset")
    assert [(p.text, p.ground_truth) for p in prompts_of(rows).prompts] == [("How many?", "3.10"), ("12", "NA")]


def test_the_case_of_a_files_ending_does_not_matter(text_file):
    assert load_rows(text_file("A.JSONL", row_line()), flag="--dataset")
    assert load_rows(text_file("A.CSV", "messages,gt_answer\nhi,4\n"), flag="--dataset")


def test_blank_lines_and_a_byte_order_mark_are_no_rows(text_file):
    path = text_file("a.jsonl", b"\xef\xbb\xbf" + (row_line() + "\n\n" + row_line()).encode())
    assert len(load_rows(path, flag="--dataset")) == 2


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_an_empty_file_holds_no_rows(text_file, suffix):
    path = text_file(f"a.{suffix}", "")
    assert refusal(path) == f"--dataset {path}: holds no rows"


def test_a_header_or_an_empty_list_is_no_row_either(text_file):
    assert "holds no rows" in refusal(text_file("a.csv", "messages,gt_answer\n"))
    assert "holds no rows" in refusal(text_file("a.json", "[]"))


def test_a_missing_file_and_an_unknown_format_are_refused(tmp_path, text_file):
    assert "no such file; give a JSONL, JSON, CSV, Parquet or Arrow file" in refusal(str(tmp_path / "none.jsonl"))
    assert "the directory holds no .jsonl, .json, .csv, .parquet, .arrow file" in refusal(str(tmp_path))
    assert "unknown format '.txt'; use one of .jsonl, .json, .csv, .parquet, .arrow" in refusal(text_file("a.txt", "x"))


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ('{"messages": \n', "not JSON: Expecting value: "),
        ("[1]\n", "is list; write an object with messages and gt_answer"),
        ('{"gt_answer": "4"}\n', "has no messages; every row needs messages and gt_answer"),
        ('{"messages": {"role": "user", "content": "hi"}}\n', "has no gt_answer"),
        (row_line(gt_answer="null"), "has no gt_answer"),
        (row_line(gt_answer='""'), "has no gt_answer"),
        (row_line(messages="[]"), "has no messages"),
        (row_line(gt_answer="[4]"), "gt_answer is list; write text or a number"),
        (row_line(gt_answer="true"), "gt_answer is bool; write text or a number"),
        (row_line(gt_answer="NaN"), "gt_answer is nan; write text or a finite number"),
        (row_line(messages="5"), "messages is int; write an object or a list of objects"),
        (row_line(messages='{"role": "user"}'), 'messages, message 1 is not {"role": ..., "content": text}'),
        (row_line(messages='{"content": "hi"}'), 'messages, message 1 is not {"role": ..., "content": text}'),
        (row_line(messages='["hi"]'), 'messages, message 1 is not {"role": ..., "content": text}'),
    ],
)
def test_a_wrong_line_is_named_by_its_number(text_file, line, cause):
    path = text_file("a.jsonl", row_line() + "\n" + line + row_line())
    assert refusal(path).startswith(f"--dataset {path}, line 3: {cause}")


def test_wrong_tests_are_named_by_their_line_and_wrong_rows_by_what_they_need(text_file):
    path = text_file("a.jsonl", '{"messages": "hi", "test_cases": {"inputs": ["1"], "outputs": []}}\n')
    with pytest.raises(ConfigError, match=r"line 1: test_cases has no list of outputs; write"):
        load_rows(path, flag="--dataset", tasks=one_task(truth="test_cases"))
    path = text_file("b.jsonl", '{"test_cases": {"inputs": ["1"], "outputs": ["1"]}}\n')
    with pytest.raises(ConfigError, match=r"line 1: has no messages; every row needs messages and test_cases\. Its"):
        load_rows(path, flag="--dataset", tasks=one_task(truth="test_cases"))
    with pytest.raises(ConfigError, match=r"line 1: has no messages; every row needs messages\. Its columns are test"):
        load_rows(path, flag="--dataset", tasks=one_task(truth=None))


def test_a_wrong_row_of_another_format_is_named_by_its_number(text_file):
    path = text_file("a.csv", "messages,gt_answer\nhi,4\nho,\n")
    assert refusal(path).startswith(
        f"--dataset {path}, row 2: has no gt_answer; every row needs messages and gt_answer"
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_answers_are_read_from_the_ecosystems_columns_and_from_one_that_is_named(write, prompts_of, name):
    rows = [{"messages": "1+1?", "label": "2", "solution": "02"}, {"messages": "1+2?", "label": "3", "solution": "03"}]
    path = write(name, rows)
    for answer_key, answers in ((None, ["2", "3"]), ("solution", ["02", "03"])):
        loaded = load_rows(path, flag="--dataset", tasks=one_task(answer_key=answer_key))
        assert [prompt.ground_truth for prompt in prompts_of(loaded).prompts] == answers


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("a.jsonl", b'\xff\xfe{"x": 1}', "is not UTF-8 text"),
        ("a.json", '[{"messages": 1,', "cannot be read as json"),
        ("a.parquet", "PAR1", "cannot be read as parquet"),
        ("a.arrow", "ARROW1", "cannot be read as arrow"),
        ("a.csv", 'a,b\n1,2,3\n"', "cannot be read as csv"),
    ],
)
def test_a_file_that_is_not_what_its_ending_says_is_refused(text_file, name, content, cause):
    assert cause in refusal(text_file(name, content))


def test_a_prompt_is_the_rendered_conversation_token_by_token(prompts_of):
    (prompt,) = prompts_of(ROWS[:1], system_prompt="Be brief.").prompts
    assert len(prompt.token_ids) == len("s:Be brief.\nu:1+1?\na:"), "no special token is added a second time"
    assert prompt.text == "1+1?"


def test_a_row_with_its_own_system_message_keeps_it(prompts_of):
    messages = [{"role": "system", "content": "Own."}, {"role": "user", "content": "1+1?"}]
    (prompt,) = prompts_of([{"messages": messages, "gt_answer": "2"}], system_prompt="Be brief.").prompts
    assert len(prompt.token_ids) == len("s:Own.\nu:1+1?\na:")


def test_an_empty_system_prompt_puts_nothing_first(prompts_of):
    (prompt,) = prompts_of(ROWS[:1], system_prompt="").prompts
    assert len(prompt.token_ids) == len("u:1+1?\na:")


def test_prompts_over_the_limit_are_refused_and_counted_never_cut(prompts_of):
    rows = [{"messages": {"role": "user", "content": "x" * n}, "gt_answer": "1"} for n in (4, 5, 6)]
    kept = prompts_of(rows, max_prompt_tokens=len("u:xxxxx\na:"))
    assert [prompt.text for prompt in kept.prompts] == ["xxxx", "xxxxx"]
    assert [prompt.uid for prompt in kept.prompts] == ["train-0", "train-1"]
    assert kept.num_refused == 1


def test_an_evaluation_task_may_be_called_train(prompts_of):
    (prompt,) = prompts_of(ROWS[:1], name="train", purpose="eval").prompts
    assert (prompt.purpose, prompt.eval_set, prompt.task) == ("eval", "train", "default")


def test_a_row_that_the_chat_template_refuses_is_named(prompts_of):
    rows = [ROWS[0], {"messages": {"role": "tool", "content": "x"}, "gt_answer": "1"}]
    with pytest.raises(ConfigError, match=r"train, prompt 2: the model's chat template refuses it: unknown role"):
        prompts_of(rows)
