"""Test the prompts, models and rewards that both sides of scripts/bench/end_to_end.py train."""

import json
from pathlib import Path

import pytest
from bench.bench_rewards import checksum, last_number, parity
from bench.length_model import CHAT_TEMPLATE, make_tokenizer
from bench.workloads import PROBLEMS, WORKLOADS, make_workload, prompt_row, replace_end, share_of_constant_groups
from transformers import AutoTokenizer

ROWS = [
    {"messages": {"role": "user", "content": "What is 2 + 3?"}, "gt_answer": "5"},
    {"messages": {"role": "user", "content": "What is 4 + 4?"}, "gt_answer": "8"},
]


@pytest.fixture
def model(tmp_path):
    """A directory with what a pretrained model has beside its weights; one token is a byte."""
    directory = tmp_path / "pretrained"
    make_tokenizer().save_pretrained(directory)
    for name in ("config.json", "generation_config.json"):
        (directory / name).write_text('{"eos_token_id": 256, "pad_token_id": 257, "kept": 1}')
    return directory


def test_problems_are_numbered_and_come_again_with_another_number():
    rows = [prompt_row(ROWS, number, make_tokenizer(), None) for number in range(3)]
    assert [row["messages"]["content"] for row in rows] == [
        "Problem 1. What is 2 + 3?",
        "Problem 2. What is 4 + 4?",
        "Problem 3. What is 2 + 3?",
    ]
    assert [row["gt_answer"] for row in rows] == ["5", "8", "5"]


def test_a_filled_prompt_has_its_tokens_with_the_template_and_ends_in_its_own_problem():
    tokenizer = make_tokenizer()
    content = prompt_row(ROWS, 0, tokenizer, 200)["messages"]["content"]
    assert content.startswith("Problem 1. What is 4 + 4?") and content.endswith("\n\nWhat is 2 + 3?")
    assert CHAT_TEMPLATE.startswith("{% for message in messages %}<|start|>")
    assert 190 <= len(content.encode()) + 3 <= 200  # a start, an end and a start of the template


def test_a_problem_that_is_longer_than_the_prompt_is_refused():
    with pytest.raises(SystemExit, match=r"problem 1 has \d+ tokens and cannot be filled to 20"):
        prompt_row(ROWS, 0, make_tokenizer(), 20)


def test_a_response_ends_at_a_token_without_use_in_all_files_and_the_model_stays_as_it_is(model, tmp_path):
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    make_workload(WORKLOADS["gsm8k"], tmp_path / "work", num_prompts=3, model=model)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "work")
    start = make_tokenizer().convert_tokens_to_ids("<|start|>")
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == start
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "work" / name).read_text()) == {
            "eos_token_id": start,
            "pad_token_id": start,
            "kept": 1,
        }
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before
    assert len((tmp_path / "work" / "prompts.jsonl").read_text().splitlines()) == 3


def test_with_real_rewards_the_model_ends_its_responses_itself(model, tmp_path):
    make_workload(WORKLOADS["real_rewards"], tmp_path / "work", num_prompts=1, model=model, problems=PROBLEMS)
    assert AutoTokenizer.from_pretrained(tmp_path / "work").eos_token == "<|end|>"


def test_a_tokenizer_without_an_unused_token_is_refused(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.bos_token = "<|start|>"
    with pytest.raises(SystemExit, match="no special token without a use"):
        replace_end(Path(model), tokenizer)


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [("so 1,250 clips", "1250", 1.0), ("it is 72.", "72", 1.0), ("72, no, 73", "72", 0.0), ("none", "72", 0.0)],
)
def test_the_last_number_of_a_response_is_its_answer(response, truth, reward):
    assert last_number(response, truth) == reward


def test_parity_is_of_the_characters_and_checksums_differ_between_texts():
    assert [parity("abc"), parity("ab")] == [1.0, 0.0]
    assert checksum("") == 0.0  # CRC-32 of nothing
    assert checksum("123456789") == 0xCBF43926 / 2**32  # the check value of CRC-32
    assert len({checksum(f"response {number}") for number in range(64)}) == 64


def test_a_group_is_constant_if_all_its_rewards_are_equal():
    rewards = {"one": [0.0, 0.0], "two": [0.0, 1.0], "three": [1.0, 1.0], "four": [1.0, 0.0]}
    samples = [{"uid": uid, "reward": reward} for uid, found in rewards.items() for reward in found]
    assert share_of_constant_groups(samples) == 0.5
