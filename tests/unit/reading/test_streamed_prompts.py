"""Streamed prompts: the same prompts in the same order as without, from places alone."""

import json
import pickle
import random
from fractions import Fraction

import pytest

import rl_example
from coati_rl.config.cli import build_config
from coati_rl.errors import ConfigError, RunError
from coati_rl.preflight.prompts import RewardFacts, load_run_rows, make_run_prompts, make_source
from coati_rl.reading.prompt_source import DatasetPrompts
from coati_rl.reading.streamed_prompts import StreamedPrompts
from coati_rl.reading.streamed_rows import StreamedRows
from rewards.registry import columns_of, default_system_prompt, needs_ground_truth

FACTS = RewardFacts(
    default_system_prompt=default_system_prompt, needs_ground_truth=needs_ground_truth, columns_of=columns_of
)
TASKS = {"math": {"reward_type": "boxed"}, "code": {"reward_type": "code"}}


def rows_of(number, seed=0):
    """Rows of lengths of which some are too long, with text that is not ASCII."""
    pick = random.Random(seed)
    return [
        {"messages": "héé " * pick.randint(1, 40) + str(n), "gt_answer": n, "unused": "x" * 50} for n in range(number)
    ]


@pytest.fixture
def write(tmp_path):
    def make(name, rows, *, begin="", between="\n"):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        text = begin + between.join(json.dumps(row, ensure_ascii=False) for row in rows)
        path.write_bytes(text.encode())
        return str(path)

    return make


def sources_of(tokenizer, **values):
    """The source of a run without and with --streaming."""
    made = []
    for streaming in (False, True):
        config = build_config({"reward_type": "boxed", "max_prompt_tokens": 250, **values, "streaming": streaming})
        rows = load_run_rows(config, FACTS)
        train, _ = make_run_prompts(rows, config, tokenizer)
        made.append((make_source(rows, config, tokenizer, train), train))
    return made


def is_same(first, second, tokenizer=None):
    """Assert that two sources draw the same, and describe the same order."""
    (plain, of_plain), (streamed, of_streamed) = first, second
    assert isinstance(of_streamed.prompts, StreamedPrompts) and isinstance(of_plain.prompts, tuple)
    assert (plain.length, plain.order) == (streamed.length, streamed.order)
    assert of_plain.num_refused == of_streamed.num_refused
    drawn = [plain.draw(number) for number in range(plain.length)]
    assert [streamed.draw(number) for number in range(plain.length)] == drawn
    assert [streamed.find(prompt.uid) for prompt in drawn] == [plain.find(prompt.uid) for prompt in drawn] == drawn
    return drawn


def test_prompts_and_their_order_are_the_same_as_without_streaming(write, tokenizer):
    path = write("a", rows_of(300), begin="\ufeff", between="\r\n \n")
    plain, streamed = sources_of(tokenizer, dataset=path, num_episodes=2, seed=3)
    drawn = is_same(plain, streamed)
    assert 0 < plain[1].num_refused < 200 and len(drawn) == 2 * (300 - plain[1].num_refused)
    assert [*streamed[1].prompts] == [*plain[1].prompts] and streamed[0].first(3) == [*plain[0].first(3)]


def test_several_sources_with_shares_and_tasks_are_the_same_too(write, tokenizer):
    code = [{"messages": f"Print {n}.", "test_cases": {"inputs": [""], "outputs": [str(n)]}} for n in range(7)]
    paths = {"math": f"{write('a', rows_of(40))}=0.3", "code": f"{write('code', code)}=0.7"}
    plain, streamed = sources_of(tokenizer, dataset=paths, tasks=TASKS, num_episodes=3)
    assert {prompt.task for prompt in is_same(plain, streamed)} == {"math", "code"}
    assert streamed[1].prompts.tasks == ("math", "code")


def test_a_directory_is_read_by_the_names_of_its_files_and_up_to_a_limit(write, tokenizer, tmp_path):
    for name, number in (("all/b", 30), ("all/a", 30)):
        write(name, rows_of(number, seed=number))
    assert len(is_same(*sources_of(tokenizer, dataset=str(tmp_path / "all"), max_samples=45))) > 30


@pytest.mark.full
def test_only_places_are_kept_and_a_copy_in_another_process_reads_the_same(write, tokenizer):
    path = write("a", rows_of(2000))
    _, (source, train) = sources_of(tokenizer, dataset=path)
    copied = pickle.loads(pickle.dumps(source))
    assert [copied.draw(number) for number in (5, 0)] == [source.draw(number) for number in (5, 0)]
    size = len(pickle.dumps(source)) - len(pickle.dumps(tokenizer))
    assert size < 20 * 2000 + 4 * train.num_refused + 10_000, "bytes for 2000 rows of 200 bytes"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 3: not JSON: Expecting property name"),
        (b"[1]", "line 3: is list; write an object with messages and gt_answer"),
        (b'{"messages": "1+1?"}', "line 3: has no gt_answer"),
        (b'{"messages": "\xff"}', "is not UTF-8 text"),
    ],
)
def test_a_wrong_line_is_found_before_anything_starts(write, tokenizer, line, message, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"messages": "1", "gt_answer": 1}\n\n' + line + b"\n")
    with pytest.raises(ConfigError) as caught:
        sources_of(tokenizer, dataset=str(path))
    plain = str(caught.value)
    config = build_config({"reward_type": "boxed", "dataset": str(path), "streaming": True})
    with pytest.raises(ConfigError) as caught:
        load_run_rows(config, FACTS)
    assert message in str(caught.value) and (str(caught.value) == plain or "UTF-8" in message)


def test_only_jsonl_is_streamed(tmp_path):
    (tmp_path / "a.csv").write_text("messages,gt_answer\n1,1\n")
    for path, message in ((tmp_path / "a.csv", "no JSONL file; --streaming reads"), (tmp_path / "b", "no such file")):
        with pytest.raises(ConfigError, match=message):
            StreamedRows(str(path), flag="--dataset", read=lambda where, row: (where, row))


def test_a_file_that_changes_while_it_is_read_is_an_error_that_names_the_line(write, tokenizer):
    path = write("a", rows_of(5))
    _, (source, _) = sources_of(tokenizer, dataset=path)
    with open(path, "a") as file:
        file.write("\n{}\n")
    with pytest.raises(RunError, match=r"a.jsonl, line \d: the file has changed since the run began"):
        source.draw(0)


def test_the_command_reads_streamed_rows(write, tmp_path, capsys):
    sizes = "-i 1 -t 1 -g 2 -ibs 2 -imbs 2 -tbs 2 -tMbs 2 -tmbs 4 --device cpu --dry-run -m a/b -rt boxed --streaming"
    assert rl_example.main(["-d", write("a", rows_of(8)), *sizes.split()], tmp_path) == 0
    assert "prompts                 8" in capsys.readouterr().out


def test_shares_are_a_part_of_the_fingerprint(write, tokenizer):
    path = write("a", rows_of(5))
    _, (source, train) = sources_of(tokenizer, dataset=f"{path}=1")
    assert source.order == DatasetPrompts([*train.prompts], num_episodes=1, seed=0, shares=(Fraction(1),)).order
