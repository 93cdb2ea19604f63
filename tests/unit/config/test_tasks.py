"""Tasks in the configuration: how they and their files are given, what they inherit, and what is refused."""

import json

import pytest
import yaml

from coati_rl.config.cli import build_config, parse
from coati_rl.config.rules import check
from coati_rl.coordinator.settings import coordinator_settings
from coati_rl.errors import ConfigError

MATH = {"reward_type": "boxed", "system_prompt": "Box it.", "temperature": 0.8}
CODE = {"reward_type": "code", "top_k": None, "max_new_tokens": 64}
SIZES = ("-t", "1", "-i", "1", "-ibs", "2", "-imbs", "1", "-tbs", "2", "-tMbs", "1", "-tmbs", "1", "-g", "2")


def config_of(*argv, **tasks):
    given = ("--tasks", json.dumps(tasks)) if tasks else ()
    config = parse([*SIZES, *given, *argv])[0]
    check(config)
    return config


def refusal(*argv, **tasks):
    with pytest.raises(ConfigError) as caught:
        config_of(*argv, **tasks)
    return str(caught.value)


def test_a_task_has_the_runs_settings_where_it_sets_none():
    config = config_of("-temp", "0.5", "-topk", "20", "--stop", "END", math=MATH, code=CODE)

    def of(name):
        task = config.of_task(name)
        return task.reward.reward_type, task.data.system_prompt, task.sampling.temperature, task.sampling.top_k

    assert of("math") == ("boxed", "Box it.", 0.8, 20)
    assert of("code") == ("code", None, 0.5, None)
    assert of("default") == ("think_answer_tags", None, 0.5, 20)
    assert config.of_task("math").sampling.stop == ["END"]
    assert [*config.by_task] == ["default", "math", "code"]


def test_tasks_are_written_as_they_were_given_and_read_again(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"tasks": {"math": MATH, "code": CODE}, "dataset": {"math": "m", "code": "c"}}))
    config = config_of("--config", str(path))
    assert config.data.dataset == {"math": "m", "code": "c"}
    written = config.flat("json")
    assert written["tasks"] == {"math": MATH, "code": CODE}, "what is not set stays the run's"
    assert build_config(written) == config


@pytest.mark.parametrize(
    ("argv", "dataset"),
    [
        (["-d", "a.jsonl"], "a.jsonl"),
        (["-d", "a.jsonl", "-d", "b.jsonl"], "b.jsonl"),  # the last one, as of any flag
        (["-d", "math=a.jsonl"], {"math": "a.jsonl"}),
        (["-d", "math=a=b.jsonl", "-d", "code=/x/c.jsonl"], {"math": "a=b.jsonl", "code": "/x/c.jsonl"}),
        (["-d", '{"math": "a.jsonl"}'], {"math": "a.jsonl"}),
        (["-d", "/runs/lr=3/a.jsonl"], "/runs/lr=3/a.jsonl"),
        (["-d", "./lr=3.jsonl"], "./lr=3.jsonl"),
    ],
)
def test_a_path_may_have_the_name_of_its_task(argv, dataset):
    assert parse(argv)[0].data.dataset == dataset


def test_a_file_that_is_there_is_a_path_whatever_it_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=3.jsonl").touch()
    assert parse(["-d", "lr=3.jsonl"])[0].data.dataset == "lr=3.jsonl"


def test_evaluation_sets_are_given_likewise():
    config, _ = parse(["-ed", "math=a.jsonl", "-ed", "code=b.jsonl"])
    assert config.data.eval_dataset == {"math": "a.jsonl", "code": "b.jsonl"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-d", "a=x", "-d", "a=y"], "--dataset a=y: a is named twice; give one file for each name"),
        (["-d", "x.jsonl", "-d", "a=y"], "--dataset x.jsonl a=y: give every path a name, NAME=PATH, or one path alone"),
        (["-ed", "x.jsonl"], "--eval-dataset x.jsonl: give every path a name, NAME=PATH"),
        (["-d", '{"a": 1}'], "--dataset {'a': 1}: is neither a path nor paths by the name of their task"),
        (["-d", '{"a/b": "x"}'], "'a/b' names no task: use letters, digits"),
        (["--tasks", "{bad"], "--tasks '{bad': not JSON"),
        (["--tasks", "math"], "--tasks 'math': not JSON"),
    ],
)
def test_what_names_no_file_or_task_is_refused(argv, message):
    assert message in refusal(*argv)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"temprature": 1}, "--tasks 'math': 'temprature': no setting of a task; did you mean temperature?"),
        (
            {"num_generations": 4},
            "--tasks 'math': 'num_generations': no setting of a task; use reward_type, reward_combine, math_answer",
        ),
        ({"temperature": 0}, "--tasks 'math': 'temperature': 0: Input should be greater than 0"),
        ({"temperature": 0.005}, "--tasks 'math': 'temperature': 0.005: is below 0.01, the lowest that vLLM"),
        ({"temperature": None}, "--tasks 'math': 'temperature': None: Input should be a valid number"),
        ({"reward_type": "bxed"}, "--tasks math: --reward-type 'bxed': unknown reward 'bxed'"),
        (
            {"max_new_tokens": 4000},
            "--tasks math: max_new_tokens 4000 exceeds -mnt 3584, by which engines and trainers",
        ),
    ],
)
def test_a_setting_that_a_task_cannot_have_is_refused_by_its_name(task, message):
    assert message in refusal(math=task)


def test_a_name_that_no_task_has_is_refused():
    assert refusal("-d", "maths=x.jsonl", math=MATH).startswith(
        "--dataset maths=x.jsonl: no such task; use one of default, math, or define it (--tasks)"
    )
    assert "'a/b' names no task" in refusal(**{"a/b": MATH})


def test_a_rule_that_only_a_task_breaks_names_the_task_and_one_that_the_run_breaks_is_said_once():
    message = refusal("--off-policy-correction", "tis", math={"top_p": 0.9})
    assert message.startswith("--tasks math: --off-policy-correction tis with --top-p 0.9: divides")
    assert refusal("-rt", "boxed,code", math=MATH, style={}).count("a response has one ground truth") == 1


def test_math_and_code_are_tasks_of_one_run_and_the_service_scores_the_one():
    config_of(math=MATH, code=CODE)
    config_of("-cv", "http://host:8000", math=MATH, code=CODE)
    assert "serves code alone" in refusal("-cv", "http://host:8000", math=MATH)
    mixed = refusal("-cv", "http://host:8000", code={"reward_type": "code,/own.py:f"})
    assert "--code-verifier-api-url with --reward-type code,/own.py:f: serves code alone" in mixed


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_cut_of_one_task_has_the_trainer_recompute_for_all(cut):
    assert not config_of(math=MATH).recomputes_old_logprobs
    assert config_of(math=cut).recomputes_old_logprobs


def test_prompts_are_sampled_as_their_task_says_and_evaluated_greedily():
    config = config_of("-mnt", "128", "--stop", "END", math=MATH, code=CODE)
    settings = coordinator_settings(config, tasks=("math", "code"))
    train, evaluation = settings.sampling_plans["train"], settings.sampling_plans["eval"]
    assert [train.sampling_of(name).temperature for name in ("math", "code", "default")] == [0.8, 1.0, 1.0]
    assert [evaluation.sampling_of(name).temperature for name in ("math", "code")] == [0.0, 0.0]
    assert [train.sampling_of(name).max_new_tokens for name in ("math", "code")] == [128, 64]
    assert settings.mismatch.temperature == 0.8, "the smallest magnifies rounding most"
    assert settings.tasks == ("math", "code")
    assert coordinator_settings(config, tasks=("math",)).tasks == ()


def test_length_is_punished_from_the_end_of_the_tasks_own_limit():
    punished = ("-mnt", "4096", "--soft-over-length-punishment")
    rules = coordinator_settings(config_of(*punished, math=MATH, code=CODE)).batch.rules
    assert (rules.length_limit("math").max_new_tokens, rules.length_limit("math").over_length_cache) == (4096, 1024)
    assert (rules.length_limit("code").max_new_tokens, rules.length_limit("code").over_length_cache) == (64, 16)
