"""Rows that the package reasoning_gym makes: the same in every process, each with its own verifier."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import pytest

from coati_rl.errors import ConfigError, RunError
from coati_rl.generator_spec import GeneratorSpec, parse_generator
from coati_rl.reading.endless_prompts import EndlessPrompts, GeneratedPrompts
from coati_rl.reading.generators import Generator, load_package, open_generator, refusals, score_answer
from coati_rl.reading.tasks import Task

SUMS = "reasoning_gym:chain_sum?min_terms=2&max_terms=3"


def opened(text, seed=0):
    return open_generator(parse_generator(text), seed=seed, where=f"--dataset {text}")


def refusal(text):
    with pytest.raises(ConfigError) as caught:
        opened(text)
    return str(caught.value)


def test_a_row_follows_from_seed_and_position_alone():
    rows = opened(SUMS)
    forward = [rows.row(position) for position in range(130)]
    assert [opened(SUMS).row(position) for position in (129, 64, 63, 0)] == [forward[n] for n in (129, 64, 63, 0)]
    assert len({row["messages"][0]["content"] for row in forward}) > 120, "rows differ, past a chunk's end too"
    assert opened(SUMS, seed=1).row(0) != forward[0]


def test_evaluation_rows_are_others_than_training_rows_and_the_same_in_every_run():
    seeds = []
    original = load_package().create_dataset
    try:
        load_package().create_dataset = lambda name, **config: seeds.append(config["seed"]) or original(name, **config)
        for generator in (opened(SUMS, seed=0), opened(SUMS, seed=2**40), opened(SUMS, seed=None)):
            generator.row(640)
    finally:
        load_package().create_dataset = original
    held_out = [seed for seed in seeds if seed >= 2**31]
    assert held_out == [2**31, 2**31 + 640] and len(seeds) == 6
    assert max(seed for seed in seeds if seed not in held_out) < 2**31 - 64


def rows_of_all(hash_seed, positions):
    """The rows of every generator, made in a process of its own, in the order of the positions."""
    code = (
        "import json, sys, random\n"
        "from coati_rl.reading.generators import load_package, open_generator as o, refusals\n"
        "from coati_rl.generator_spec import parse_generator as p\n"
        "for name in sorted(load_package().DATASETS.keys() - refusals().keys()):\n"
        "    made = o(p('reasoning_gym:' + name), seed=0, where='')\n"
        f"    rows = {{number: made.row(number) for number in {positions}}}\n"
        "    print()  # bf prints without ending its line\n"
        "    print(json.dumps([name, sorted(rows.items())]))\n"
    )
    environment = {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": ":".join(sys.path)}
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, check=True, capture_output=True)
    return dict(json.loads(line) for line in ran.stdout.splitlines() if line.startswith(b"["))


@pytest.mark.full
@pytest.mark.timeout(400)
def test_the_rows_of_every_generator_are_the_same_in_any_process_and_order():
    positions = [0, 1, 2, 3, 70]
    first, second = rows_of_all(1, positions), rows_of_all(7, positions[::-1])
    num_usable = 97 - ("zebra_puzzles" in refusals())  # which needs a compiled package
    assert len(first) == num_usable and [name for name in first if first[name] != second[name]] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reasoning_gym:chain_sun", "chain_sun: no such generator; use chain_sum"),
        ("reasoning_gym:chain_sum?min_term=3", "chain_sum has no parameter min_term; use min_terms"),
        ("reasoning_gym:chain_sum?min_terms=9&max_terms=2", "chain_sum makes no row with these parameters: Assertion"),
        ("reasoning_gym:chain_sum?min_terms=few", "chain_sum makes no row with these parameters: TypeError"),
        ("reasoning_gym:word_ladder", "word_ladder cannot be used: its rows are not the same in every process"),
        ("reasoning_gym:codeio", "codeio cannot be used: it runs programs of its data file"),
        ("reasoning_gym:composite", "composite cannot be used: mix generators by their shares"),
    ],
)
def test_what_cannot_be_made_is_refused_with_the_nearest_names(text, message):
    assert message in refusal(text)
    assert refusal(text).startswith(f"--dataset {text}: ")


def test_without_the_package_the_message_names_the_extra(monkeypatch):
    load_package.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    try:
        with pytest.raises(ConfigError, match=r"not installed .*; pip install 'coati-rl\[reasoning-gym\]'"):
            opened(SUMS)
    finally:
        load_package.cache_clear()


# Generators whose metadata JSON changes (tuples, numbers as keys), and those whose verifiers parse an answer.
VERIFIED = ["chain_sum", "rearc", "countdown", "puzzle24", "n_queens", "simple_integration", "maze"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", VERIFIED)
def test_the_right_answer_scores_1_after_the_row_was_written_as_json(name):
    row = json.loads(json.dumps(opened(f"reasoning_gym:{name}").row(1)))
    assert score_answer(row["gt_answer"], row, row["gt_answer"]) == 1
    assert score_answer("no answer", row, row["gt_answer"]) < 0.2


def test_an_entry_of_the_package_that_was_written_as_json_is_scored_too():
    entry = importlib.import_module("reasoning_gym").create_dataset("chain_sum", seed=1, size=1)[0]
    row = {"metadata": json.loads(json.dumps(entry["metadata"]))}
    assert score_answer(entry["answer"], row, entry["answer"]) == 1


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("n_queens", "open({path!r}, 'w')"),
        ("string_insertion", "[open({path!r}, 'w')]"),
        ("spiral_matrix", "[open({path!r}, 'w')]"),
        ("binary_matrix", "[[open({path!r}, 'w')]]"),
        ("countdown", "open({path!r}, 'w')"),
        ("countdown", "open({codes}, chr(119))"),
        ("puzzle24", "open({codes}, chr(119))"),
        ("simple_integration", "open({codes}, chr(119))"),
    ],
)
def test_an_answer_is_never_run_as_a_program(name, answer, tmp_path):
    path = str(tmp_path / "written")
    text = answer.format(path=path, codes="+".join(f"chr({ord(letter)})" for letter in path))
    row = opened(f"reasoning_gym:{name}").row(0)
    assert score_answer(text, row, row["gt_answer"]) < 0.2
    assert not (tmp_path / "written").exists()


def test_literals_and_formulas_are_still_read():
    board = opened("reasoning_gym:n_queens").row(0)
    as_list = repr([line.split() for line in board["gt_answer"].splitlines()])
    assert score_answer(as_list, board, board["gt_answer"]) == 0.5
    integral = opened("reasoning_gym:simple_integration").row(0)
    assert score_answer(f"({integral['gt_answer']})*2/2", integral, integral["gt_answer"]) == 1


@pytest.fixture
def make_prompts_of(tokenizer):
    def make(text=SUMS, *, limit=500, name="train"):
        return GeneratedPrompts(
            name=name,
            generator=opened(text),
            task=Task(name="reasoning_gym", truth=None),
            tokenizer=tokenizer,
            max_prompt_tokens=limit,
            input_template=None,
        )

    return make


def test_one_generator_is_drawn_by_number_without_an_end(make_prompts_of):
    source, again = (EndlessPrompts({"train": make_prompts_of()}, seed=0) for _ in range(2))
    drawn = [source.draw(number) for number in range(5)]
    assert [prompt.uid for prompt in drawn] == [f"train-{number}.0" for number in range(5)]
    assert [again.draw(number) for number in (4, 1)] == [drawn[4], drawn[1]]
    assert again.find("train-3.0") == drawn[3]
    assert (source.length, source.order.num_prompts, source.order) == (None, None, again.order)
    other = EndlessPrompts({"train": make_prompts_of("reasoning_gym:chain_sum")}, seed=0)
    assert other.order.fingerprint != source.order.fingerprint


def test_a_generator_and_a_file_are_mixed_by_their_shares(make_prompts_of, make_prompts):
    parts = {
        "train": make_prompts_of(),
        "train:1": [replace(p, uid=f"train:1-{n}") for n, p in enumerate(make_prompts(3))],
    }
    source = EndlessPrompts(parts, seed=0, shares=(Fraction(1, 4), Fraction(3, 4)))
    drawn = [source.draw(number) for number in range(40)]
    uids = [prompt.uid for prompt in drawn]
    assert [uid for uid in uids if uid.startswith("train-")] == [f"train-{number}.0" for number in range(10)]
    of_file = [uid for uid in uids if uid.startswith("train:1-")]
    assert len(set(of_file)) == 30 and sorted(of_file[:3]) == ["train:1-0.0", "train:1-1.0", "train:1-2.0"]
    assert [source.find(uid) for uid in uids] == drawn
    others = [(Fraction(1, 2), Fraction(1, 2)), (Fraction(3, 4), Fraction(1, 4))]
    assert len({EndlessPrompts(parts, seed=0, shares=each).order.fingerprint for each in others}) == 2


def test_a_row_that_is_too_long_is_replaced_by_another_one_of_the_same_number(make_prompts_of):
    usual = [make_prompts_of().prompt(number) for number in range(20)]
    lengths = sorted(len(prompt.token_ids) for prompt in usual)
    limit = lengths[10]
    short = make_prompts_of(limit=limit)
    found = [short.prompt(number) for number in range(20)]
    assert all(len(prompt.token_ids) <= limit for prompt in found)
    kept = [number for number, prompt in enumerate(usual) if len(prompt.token_ids) <= limit]
    assert [found[number] for number in kept] == [usual[number] for number in kept]
    assert [prompt.uid for prompt in found] == [f"train-{number}" for number in range(20)]
    with pytest.raises(RunError, match=r"16 rows were made for prompt 0, .* --max-prompt-tokens 3; raise --max-prompt"):
        make_prompts_of(limit=3).prompt(0)


def test_numpy_s_global_state_is_left_alone():
    import numpy as np

    np.random.seed(3)
    expected = np.random.rand()
    np.random.seed(3)
    Generator(GeneratorSpec(name="pool_matrix", parameters={}), seed=0).row(0)
    assert np.random.rand() == expected
