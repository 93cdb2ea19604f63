"""Test user mistakes: one clear message, exit code 2, nothing started."""

import json
import logging

import pytest
import ray

import rl_example
from rewards.remote import client


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    """Call the command line in this process. Returns: exit code, what was printed, the run directory it was given."""

    def run(*arguments):
        root = logging.getLogger()
        run_dir = tmp_path / "run"
        capsys.readouterr()  # of the model that was made for this
        with monkeypatch.context() as patch:
            patch.setattr(root, "handlers", [logging.NullHandler()])  # the command line sets a level of the first one
            code = rl_example.main([*map(str, arguments), "--run-dir", str(run_dir)], tmp_path)
        printed = capsys.readouterr()
        return code, printed.out + printed.err, run_dir

    return run


@pytest.fixture
def refuse(call, make_tiny):
    """Run with these flags; the message of a refusal. Asserts that nothing was started or written."""

    def run(*arguments, model=None):
        code, message, run_dir = call("-m", model or make_tiny(tied=True), "-rt", "boxed", *arguments)
        assert code == 2, message
        assert not ray.is_initialized()
        assert not run_dir.exists(), "a refused run leaves no run directory"
        assert message and all(line.startswith("rl_example.py: ") for line in message.splitlines()), message
        return message

    return run


@pytest.fixture
def dataset(tmp_path):
    """Lines of a JSONL file -> its path."""

    def write(*lines):
        path = tmp_path / "data.jsonl"
        path.write_text("".join(line + "\n" for line in lines))
        return path

    return write


ROW = json.dumps({"messages": {"role": "user", "content": "1 + 1?"}, "gt_answer": "2"})


def test_as_a_command_it_exits_with_2_and_one_line(start_run, make_tiny):
    attempt = start_run("-m", make_tiny(tied=True), "-d", "/no/data.jsonl")
    assert attempt.wait(120) == 2, attempt.text()
    assert attempt.text().startswith("rl_example.py: --dataset /no/data.jsonl: no such file; ")
    assert attempt.text().count("\n") == 1
    assert not attempt.run_dir.exists()


def test_a_missing_model_directory(refuse, dataset):
    assert "--model /no/such/model: no such directory" in refuse("-d", dataset(ROW), model="/no/such/model")


def test_a_missing_dataset(refuse):
    assert "--dataset /no/data.jsonl: no such file" in refuse("-d", "/no/data.jsonl")


def test_an_empty_dataset(refuse, dataset):
    assert "holds no rows" in refuse("-d", dataset())


def test_a_json_line_that_does_not_parse(refuse, dataset):
    path = dataset(ROW, '{"messages": ')
    assert f"{path}, line 2: not JSON" in refuse("-d", path)


@pytest.mark.parametrize("missing", ["messages", "gt_answer"])
def test_a_row_without_messages_or_gt_answer(refuse, dataset, missing):
    row = {key: value for key, value in json.loads(ROW).items() if key != missing}
    assert f"line 2: has no {missing}" in refuse("-d", dataset(ROW, json.dumps(row)))


def test_rows_without_tests_for_a_code_reward_and_tests_that_cannot_be_run(refuse, dataset):
    message = refuse("-d", dataset(ROW), "-rt", "code")
    assert "line 1: has no test_cases" in message and "(it has an answer: use boxed or think_answer_tags)" in message
    tests = {"messages": "Double it.", "test_cases": {"inputs": ["1", "2"], "outputs": ["2"]}}
    assert "line 1: test_cases has 2 inputs and 1 outputs" in refuse("-d", dataset(json.dumps(tests)), "-rt", "code")


def test_a_reward_function_that_is_not_there_or_cannot_be_called(refuse, dataset, tmp_path):
    mine = tmp_path / "mine.py"
    assert f"--reward-type {mine}:score: there is no file {mine}" in refuse("-d", dataset(ROW), "-rt", f"{mine}:score")
    mine.write_text("def score(question): return 1\n")
    message = refuse("-d", dataset(ROW), "-rt", f"boxed=1,{mine}:score=0.5")
    assert f"{mine}:score: takes (question); a reward function takes (messages, answer), " in message
    other = tmp_path / "other.py"  # a file is imported once in a process
    other.write_text("import nowhere_to_be_found\n")
    assert "fails on import: ModuleNotFoundError" in refuse("-d", dataset(ROW), "-rt", f"{other}:score")


def test_a_reward_function_that_would_get_no_ground_truth(refuse, dataset, tmp_path):
    mine = tmp_path / "contains.py"
    mine.write_text("def score(messages, answer): return float(answer in messages[-1]['content'])\n")
    row = json.dumps({"messages": "1 + 1?", "solution": "2"})
    message = refuse("-d", dataset(row), "-rt", f"{mine}:score")
    assert "line 1: has no gt_answer (or answer, ground_truth, label; --answer-key names another column)" in message
    sizes = ("-i", 1, "-t", 1, "-ibs", 2, "-imbs", 2, "-tbs", 2, "-tMbs", 2)
    message = refuse("-d", dataset(row), "-rt", f"{mine}:score", "--answer-key", "solution", *sizes)
    assert "1 usable prompts" in message, "the row was read, and is too few"


def test_a_service_that_is_not_there(refuse, dataset, monkeypatch):
    monkeypatch.setenv("COATI_REWARD_TOKEN", "a-token-of-this-test-0123456789")
    monkeypatch.setattr(client, "_CHECK_S", 1.0)  # else it is waited for
    message = refuse("-d", dataset(ROW), "-rt", "code", "-cv", "http://127.0.0.1:9")
    assert "--code-verifier-api-url http://127.0.0.1:9: no reward service answers there" in message
    assert "a-token-of-this-test" not in message


def test_sizes_that_do_not_divide(refuse, dataset):
    message = refuse("-d", dataset(ROW), "-ibs", 3, "-imbs", 3, "-tbs", 2, "-tMbs", 2, "-i", 1, "-t", 1)
    assert "(P * ibs) % (tbs * dp) must be 0: 1 * 3 = 3" in message
    assert "-tbs 3 -tMbs 3 or -ibs 4 -imbs 4" in message


@pytest.mark.parametrize(
    ("flags", "rule", "remedy"),
    [
        # The model has 4 heads, 2 KV heads, 512 tokens and 2 layers.
        (("-t", 4, "-tp", 4), "-tp 4: must divide num_key_value_heads 2", "use -tp 1 or 2"),
        (("-t", 3, "-pp", 3), "-pp 3", "-pp 2"),
        (("-t", 4, "-pp", 2, "-zero", 2), "-zero 2", "-zero 1"),
        (("-t", 2, "-zero", 1, "--precision", "fp32"), "--precision fp32", "--precision bf16"),
        (
            ("-t", 2, "--max-tokens-per-microbatch", 300, "-mpt", 256, "-mnt", 64),
            "--max-tokens-per-microbatch 300",
            "320",
        ),
    ],
)
def test_layouts_that_cannot_be(refuse, dataset, flags, rule, remedy):
    sizes = ("-i", 1, "-ibs", 4, "-imbs", 4, "-tbs", 1, "-tMbs", 1, "-tmbs", 1)
    message = refuse("-d", dataset(*[ROW] * 4), *sizes, *flags)
    assert rule in message and remedy in message


def test_a_checkpoint_that_is_none(refuse, dataset, tmp_path):
    message = refuse(
        "-d", dataset(ROW), "-cp", tmp_path, "-i", 1, "-t", 1, *("-ibs", 1, "-imbs", 1, "-tbs", 1, "-tMbs", 1)
    )
    assert "there is no checkpoint" in message and "give -cp a directory step-<N>" in message


def test_an_unknown_key_in_the_config_file(refuse, dataset, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("num_trainer: 2\n")
    assert "unknown field 'num_trainer'; did you mean num_trainers?" in refuse("-d", dataset(ROW), "--config", config)


def test_more_devices_than_the_machine_has(refuse, dataset):
    message = refuse("-d", dataset(ROW), "--device", "cuda", "-i", 500, "-t", 500, "-ibs", 64)
    assert "GPUs = P * ptp + T: 500 * 1 + 500 = 1000 are needed, this machine has" in message


def test_a_dry_run_plans_for_devices_that_the_machine_lacks_with_a_warning(call, make_tiny):
    model = make_tiny(tied=True)
    sizes = ["-i", 500, "-t", 500, "-ibs", 64, "-tbs", 1, "-tMbs", 1, "-e", 100]
    code, printed, run_dir = call("-m", model, "-d", model / "train.jsonl", "--dry-run", "--device", "cuda", *sizes)
    assert code == 0, printed
    assert "warning: GPUs = P * ptp + T" in printed and "sync period" in printed
    assert not run_dir.exists()
