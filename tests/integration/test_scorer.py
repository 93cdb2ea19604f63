"""Test the scorer of a run from its command line: real processes, a real sandbox, a real service."""

import functools
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coati_rl.config.cli import parse
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError
from coati_rl.protocols import GroupScorer
from coati_rl.types import Problem, Score
from rewards.scorer import scorer_factory

REPOSITORY = Path(__file__).parents[2]
TOKEN = "a-token-of-this-test-0123456789"
DOUBLES = json.dumps({"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]})
PROGRAM = "```python\nprint(int(input()) * 2)\n```"


@pytest.fixture
def factory() -> Callable[[str], Callable[[], GroupScorer]]:
    """Flags -> the factory, as a producer gets it."""

    def make(flags: str) -> Callable[[], GroupScorer]:
        config, _ = parse(flags.split())
        check(config)
        return pickle.loads(pickle.dumps(scorer_factory(config)))

    return make


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], str]:
    """The source of a function `score` -> its reward type."""

    def make(source: str) -> str:
        (tmp_path / "mine.py").write_text(source, encoding="utf-8")
        return f"{tmp_path}/mine.py:score"

    return make


def scores_of(make_scorer: Callable[[], GroupScorer], responses: list[str], ground_truth: str = "") -> list[Score]:
    scorer = make_scorer()
    try:
        scores: list[Score] = scorer.submit(responses, Problem(uid="p", ground_truth=ground_truth)).result(timeout=120)
        return scores
    finally:
        scorer.close()


def test_rewards_and_weights_of_the_command_line_score_a_group(factory, own) -> None:
    name = own(
        "def score(queries, prompts, labels): return [-float(len(query)) for query in queries]\n"
        "def equals(response, ground_truth): return float(response == ground_truth)\n"
    )
    equals = name.replace(":score", ":equals")  # without the imports of math answers, which take a second
    first, second = scores_of(factory(f"-rt {equals}=1,{name}=0.125"), ["5", "4!"], "5")
    assert (first.reward, first.verdict, first.breakdown) == (1 - 1 / 8, "ok", {"mine.equals": 1.0, "mine.score": -1.0})
    assert (second.reward, second.verdict) == (-2 / 8, "wrong")
    assert second.breakdown == {"mine.equals": 0.0, "mine.score": -2.0}


@pytest.mark.full
def test_each_task_of_a_run_is_scored_by_its_own_reward_at_the_same_time(factory, own) -> None:
    name = own("def score(response): return len(response) / 4\n")
    tasks = {
        "math": {"reward_type": "boxed"},
        "code": {"reward_type": "code"},
        "short": {"reward_type": name, "correct_from": 0.5},
    }
    scorer = factory(f"--tasks {json.dumps(tasks, separators=(',', ':'))}")()
    try:
        asked = {
            "math": ([r"\boxed{5}", "5"], "5"),
            "code": ([PROGRAM, "```python\nprint(2)\n```"], DOUBLES),
            "short": (["aa", "a"], ""),
            "default": (["<think></think><answer>5</answer>", "5"], "5"),
        }
        futures = {
            task: scorer.submit(responses, Problem(ground_truth=truth, task=task))
            for task, (responses, truth) in asked.items()
        }
        scores = {task: future.result(timeout=120) for task, future in futures.items()}
    finally:
        scorer.close()
    assert [[score.answer_correct for score in scores[task]] for task in asked] == [[True, False]] * 4
    assert [score.reward for score in scores["short"]] == [0.5, 0.25]


def test_what_a_function_raises_or_prints_reaches_nobody_but_its_sample(factory, own, capfd) -> None:
    name = own("def score(response, ground_truth):\n    print('hello')\n    return {'a': 1}[response]\n")
    scores = scores_of(factory(f"-rt {name}"), ["a", "b", "a"])
    assert [score.verdict for score in scores] == ["ok", "invalid", "ok"]
    assert scores[1].detail == "KeyError: 'b' (mine.py:3)"
    output = capfd.readouterr()
    assert "hello" not in output.out + output.err
    assert "Traceback" in output.err, "for the producer's log"


@pytest.mark.full
def test_a_function_that_ends_its_process_costs_its_sample_only(factory, own) -> None:
    name = own("import os\ndef score(response, ground_truth):\n    return os._exit(1) if response == 'bad' else 1\n")
    assert [score.verdict for score in scores_of(factory(f"-rt {name}"), ["a", "bad", "a"])] == ["ok", "invalid", "ok"]


@pytest.mark.full
def test_a_response_has_the_time_of_reward_timeout_s(factory, own) -> None:
    name = own("import time\ndef score(response, ground_truth):\n    time.sleep(float(response))\n    return 1\n")
    scores = scores_of(factory(f"-rt {name} --reward-timeout-s 0.5"), ["0", "600", "0"])
    assert [score.verdict for score in scores] == ["ok", "invalid", "ok"]
    assert "0.5 s" in scores[1].detail


def test_a_group_that_is_scored_in_one_call_has_the_time_of_all_its_responses(factory, own) -> None:
    name = own(
        "import time\ndef score(queries, prompts, labels):\n    time.sleep(float(queries[0]))\n    return [1] * 2\n"
    )
    scorer = factory(f"-rt {name} --reward-timeout-s 0.5 -g 4")()
    groups = [scorer.submit([response, ""], Problem(ground_truth="")) for response in ("1", "600")]
    verdicts = [[score.verdict for score in group.result(120)] for group in groups]
    scorer.close()
    assert verdicts == [["ok"] * 2, ["invalid"] * 2]


def test_as_many_processes_score_as_reward_workers_says(factory, own, tmp_path: Path) -> None:
    # Each waits for the other: with one process both would time out.
    name = own(
        "import pathlib, time\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "def score(response, ground_truth):\n"
        "    (here / f'{response}.here').touch()\n"
        "    while len([*here.glob('*.here')]) < 2:\n"
        "        time.sleep(0.01)\n"
        "    return 1\n"
    )
    scores = scores_of(factory(f"-rt {name} --reward-workers 2 --reward-timeout-s 60"), ["a", "b"])
    assert [score.verdict for score in scores] == ["ok", "ok"]


def test_a_program_of_the_model_is_scored_in_the_sandbox(factory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET_OF_MINE", "seen")
    reads = "```python\nimport os\nprint(os.environ.get('A_SECRET_OF_MINE', 'hidden'))\n```"
    tests = json.dumps({"inputs": [""], "outputs": ["seen\n"]})
    assert scores_of(factory("-rt code"), [reads], tests)[0].verdict == "wrong"
    assert scores_of(factory("-rt code --run-model-code-without-sandbox"), [PROGRAM], DOUBLES)[0].verdict == "ok"


def test_a_function_that_cannot_be_called_is_refused_before_anything_starts(factory, own) -> None:
    with pytest.raises(ConfigError, match=r"mine.py:score: takes \(x\); a reward function takes"):
        factory(f"-rt {own('def score(x): return 1')}")


def test_no_sandbox_on_this_machine_is_refused_unless_the_risk_is_taken(
    factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="bwrap is not installed: install it"):
        factory("-rt code")
    factory("-rt code --run-model-code-without-sandbox")


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    """The address of a service that scores code."""
    command = [sys.executable, "-m", "rewards", "serve", "--type", "code", "--port", "0"]
    environment = {**os.environ, "COATI_REWARD_TOKEN": TOKEN}
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            seen += line
            if found := re.search(r"http://[\d.]+:\d+", line):
                yield found[0]
                break
        else:
            pytest.fail(f"the service has not started: {seen}")
        process.send_signal(signal.SIGTERM)
        process.stdout.read()


def test_a_service_scores_for_the_run_and_its_token_is_nowhere_in_the_configuration(
    factory, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COATI_REWARD_TOKEN", TOKEN)
    flags = f"-rt code -cv {service} --reward-timeout-s 30 -g 2"
    make_scorer = factory(flags)
    monkeypatch.delenv("COATI_REWARD_TOKEN")  # a producer on another node has none
    right, wrong = scores_of(make_scorer, [PROGRAM, "```python\nprint(2)\n```"], DOUBLES)
    assert (right.verdict, right.breakdown) == ("ok", {"tests_passed": 1.0})
    assert (wrong.verdict, wrong.breakdown) == ("wrong", {"tests_passed": 0.5})
    assert TOKEN not in parse(flags.split())[0].model_dump_json()
    assert isinstance(make_scorer, functools.partial) and make_scorer.keywords["timeout_s"] == 60.0  # 2 x 30


@pytest.mark.full
def test_a_service_that_is_not_there_or_knows_another_token_is_refused(
    factory, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COATI_REWARD_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="set COATI_REWARD_TOKEN"):
        factory(f"-rt code -cv {service}")
    monkeypatch.setenv("COATI_REWARD_TOKEN", "another-token-0123456789")
    with pytest.raises(ConfigError, match="set COATI_REWARD_TOKEN to the token"):
        factory(f"-rt code -cv {service}")
    monkeypatch.setattr("rewards.remote.client._CHECK_S", 0.5)
    with pytest.raises(ConfigError, match="no reward service answers there"):
        factory("-rt code -cv http://127.0.0.1:9")
