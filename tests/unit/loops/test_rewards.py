"""Test a user's reward in a whole run: its failures, its reports, and the messages to the user."""

import json
from collections import Counter

import pytest

from coati_rl.errors import RunError


@pytest.fixture
def own(tmp_path):
    """The source of a function `score` -> its reward type."""

    def make(source):
        (tmp_path / "mine.py").write_text(source, encoding="utf-8")
        return f"{tmp_path}/mine.py:score"

    return make


def lines_of(directory):
    return [json.loads(line) for file in sorted(directory.glob("*step*.jsonl")) for line in file.open()]


def test_a_function_that_always_raises_stops_the_run_with_the_exception_and_its_line(run_in_threads, own, caplog):
    name = own("def score(response, ground_truth):\n    return {'1': 1.0}[ground_truth + '?']\n")
    message = (
        r"^(\d+) samples of one step failed or could not be scored, 0 are allowed \(--max-failure-rate\); "
        r"\1 samples failed because: KeyError: '1\?' \(mine.py:2\); the log names each$"
    )
    with pytest.raises(RunError, match=message):
        run_in_threads({"reward_type": name}, score=None)
    named = [record.getMessage() for record in caplog.records if "could not be scored" in record.getMessage()]
    first, second = named[:2]
    assert first.startswith("sample 0 of prompt train-") and first.endswith(": KeyError: '1?' (mine.py:2)")
    assert second.startswith("sample 1 of prompt train-")


def test_the_most_common_cause_is_the_one_that_is_told(run_in_threads, own):
    name = own(
        "calls = []\n"
        "def score(response, ground_truth):\n"
        "    calls.append(response)\n"
        "    return None if len(calls) == 1 else 1 / 0\n"
    )
    with pytest.raises(RunError, match=r"4 are allowed .* samples failed because: ZeroDivisionError: .* \(mine.py:4"):
        run_in_threads({"reward_type": name, "num_generations": 5, "max_failure_rate": 0.4}, score=None)


def test_rewards_too_large_to_train_on_stop_the_run_instead_of_training_nothing(run_in_threads, own):
    name = own("def score(response, ground_truth):\n    return 1e300 * (len(response) % 2)\n")
    message = r"samples failed because: a reward of 1e\+300 cannot be trained on; return at most 1e\+09 in size"
    with pytest.raises(RunError, match=message):
        run_in_threads({"reward_type": name}, score=None)


def test_a_run_goes_on_with_the_samples_that_could_be_scored(run_in_threads, own):
    name = own(
        "def score(response, ground_truth):\n"
        "    if len(response) % 4 == 0:\n        raise ValueError('too even')\n    return len(response) % 3\n"
    )
    settings = {"reward_type": name, "max_failure_rate": 1.0, "num_generations": 4}
    trace = run_in_threads(settings, score=None)
    assert len(trace.steps) >= 3
    lines = lines_of(trace.paths.rollouts)
    verdicts = Counter(line["verdict"] for line in lines)
    assert verdicts["invalid"] > 0 and verdicts["ok"] + verdicts["wrong"] > 0
    assert sum(record["samples_invalid"] for record in trace.steps) == verdicts["invalid"]
    for line in lines:
        is_even = len(line["response"]) % 4 == 0
        assert (line["verdict"] == "invalid") == is_even
        assert line["detail"] == ("ValueError: too even (mine.py:3)" if is_even else "")


def test_the_parts_of_a_reward_are_in_the_metrics_the_rollouts_and_the_evaluation(run_in_threads, own, write_prompts):
    name = own(
        "def score(response, ground_truth):\n    return {'reward': len(response), 'vowels': response.count('a')}\n"
    )
    settings = {
        "reward_type": f"boxed=1,{name}=0.5",
        "eval_dataset": {"math": write_prompts("math", 2)},
        "eval_interval": 2,
    }
    trace = run_in_threads(settings, score=None)
    lines = lines_of(trace.paths.rollouts)
    assert len(lines) == 16
    for line in lines:
        length = len(line["response"])
        assert line["breakdown"] == {
            "boxed": 0.0,
            "mine.score": length,
            "mine.score/vowels": line["response"].count("a"),
        }
        assert line["reward"] == 0.5 * length
    for record in trace.steps:
        of_step = [line["breakdown"] for line in lines if line["step"] == record["step"]]
        for part in of_step[0]:
            assert record[f"reward/{part}"] == pytest.approx(sum(each[part] for each in of_step) / len(of_step))
        assert record["reward_mean"] == pytest.approx(0.5 * record["reward/mine.score"])
    evaluated = lines_of(trace.paths.evaluation)
    assert {line["breakdown"]["mine.score"] == len(line["response"]) for line in evaluated} == {True}
