"""Test `coati-rl generate` in this process with the fake engine: messages, exit codes, rows."""

import json
import logging
import os

import pytest

import producer.engines
import rl_generate


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"messages": {"role": "user", "content": "q" * (n + 1)}, "gt_answer": "1"} for n in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def call(capsys, monkeypatch, tmp_path, model_dir, prompts):
    """Run the command with these flags; returns exit code and what was printed."""

    def run(*flags, model=model_dir, dataset=prompts, output=tmp_path / "out.jsonl"):
        with monkeypatch.context() as patch:
            patch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
            patch.setattr(os, "environ", os.environ.copy())  # the command sets variables of its engine
            files = ["-m", str(model), "-d", str(dataset), "-o", str(output)]
            code = rl_generate.main(
                [*files, *["--device", "cpu", "-b", "fake", "-mnt", "8", "-mpt", "64"], *flags], tmp_path
            )
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


@pytest.fixture
def refuse(call, monkeypatch, tmp_path):
    """The message of a refusal: exit code 2, no engine, no file."""

    def run(*flags, **paths):
        with monkeypatch.context() as patch:
            patch.setattr(producer.engines, "create_engine", lambda *_, **__: pytest.fail("an engine was loaded"))
            code, message = call(*flags, **paths)
        assert code == 2, message
        assert all(line.startswith("coati-rl generate: ") for line in message.splitlines()), message
        assert not [*tmp_path.glob("out.jsonl*")]
        return message

    return run


def rows_in(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().split("\n")[:-1]]


def test_each_prompt_gets_its_samples(call, tmp_path):
    code, printed = call("-g", "2")
    assert code == 0, printed
    rows = rows_in(tmp_path)
    assert [(row["uid"], row["sample"]) for row in rows] == [
        (f"train-{n}", sample) for n in range(4) for sample in (0, 1)
    ]
    assert [row["messages"][0]["content"] for row in rows[::2]] == ["q", "qq", "qqq", "qqqq"]
    assert all(row["messages"][-1] == {"role": "assistant", "content": row["response"]} for row in rows)
    done, figures = printed.strip().splitlines()[-1].split(": {")
    assert done == f"done: {tmp_path}/out.jsonl"
    assert json.loads("{" + figures)["num_samples"] == 8


def test_a_function_of_ones_own_scores_and_the_best_sample_is_kept(call, tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def length(response):\n    return float(len(response))\n")
    code, printed = call("-g", "4", "-rt", f"{own}:length", "--best-of")
    assert code == 0, printed
    rows = rows_in(tmp_path)
    assert [row["uid"] for row in rows] == [f"train-{n}" for n in range(4)]
    assert [row["reward"] for row in rows] == [len(row["response"]) for row in rows]


@pytest.mark.full
def test_a_dry_run_prints_the_plan_and_writes_nothing(refuse, call, tmp_path):
    code, printed = call("-g", "2", "--dry-run")
    assert code == 0
    assert "samples                 8" in printed
    first = next(line for line in printed.splitlines() if line.startswith("first prompt"))
    assert "q" in first
    assert "its reward" not in printed
    assert "its reward              1 for \\boxed{1}" in call("-rt", "boxed", "-mpt", "512", "--dry-run")[1]
    assert not [*tmp_path.glob("out.jsonl*")]


def test_the_same_command_has_nothing_left_to_do_and_another_one_is_refused(call, tmp_path, monkeypatch):
    assert call("-g", "2")[0] == 0
    before = rows_in(tmp_path)
    monkeypatch.setattr(producer.engines, "create_engine", lambda *_, **__: pytest.fail("an engine was loaded"))
    assert call("-g", "2")[0] == 0
    assert rows_in(tmp_path) == before
    code, message = call("-g", "2", "--seed", "1")
    assert (code, "was written with seed 0, not 1; give another -o, or --overwrite to replace it" in message) == (
        2,
        True,
    )


@pytest.mark.parametrize(
    ("rows", "flags", "message"),
    [
        (None, [], "no such file"),
        (['{"messages": 1'], [], "line 1: not JSON"),
        (['{"gt_answer": "1"}'], [], "has no messages"),
        (['{"messages": {"role": "user", "content": "q"}}'], ["-rt", "boxed"], "has no gt_answer"),
        (['{"messages": {"role": "tool", "content": "q"}}'], [], "unknown role"),
        ([json.dumps({"messages": {"role": "user", "content": "q" * 99}})], [], "exceed --max-prompt-tokens 64"),
    ],
)
def test_rows_that_are_wrong_are_refused_before_an_engine_is_loaded(refuse, tmp_path, rows, flags, message):
    dataset = tmp_path / "wrong.jsonl"
    if rows is not None:
        dataset.write_text("".join(row + "\n" for row in rows))
    assert message in refuse(*flags, dataset=dataset)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--best-of", "-g", "2"], "--best-of without --reward-type"),
        (["-mnt", "2000"], "1024 positions"),
        (["-rt", "missing.py:f"], "missing.py"),
        (["-b", "vllm", "--engine-arg", "seed=3"], "--engine-arg seed: cannot be set like this: use --seed"),
        (["-b", "vllm", "--engine-arg", "enable_chunked_prefill=true"], "on the CPU"),
        (["--max-num-seqs", "33"], "--max-num-seqs 33: has no effect"),
        (["-rt", "http://127.0.0.1:9/score", "-cv", "nowhere"], "-cv"),
    ],
)
def test_flags_that_are_wrong_are_refused_before_an_engine_is_loaded(refuse, flags, message):
    told = refuse(*flags)
    assert message in told or "--code-verifier-api-url" in told


def test_a_model_that_is_not_there_is_refused(refuse, tmp_path):
    assert "no such directory" in refuse(model=tmp_path / "nothing")
