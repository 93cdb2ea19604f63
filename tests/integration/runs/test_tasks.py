"""A real run of three tasks, as a user writes it: math, code in the sandbox, and an own function, with vLLM."""

import json

import pytest
import yaml

from tests.integration.runs.records import assert_complete, assert_engine_and_trainer_agree, lines, read_rollouts
from tests.metric_names import OF_A_TASK

TASKS = {
    "math": {"reward_type": "boxed", "temperature": 1.2},
    "code": {"reward_type": "code", "max_new_tokens": 24},
    "three": {"reward_type": "<own>", "system_prompt": "You are a helpful assistant.", "temperature": 0.8},
}
OWN = "def score(response):\n    return 2.0 * ('3' in response)\n"
TRUTHS = {"math": {"gt_answer": "2"}, "code": {"test_cases": {"inputs": [""], "outputs": ["2"]}}, "three": {}}
FLAGS = (
    "-i 1 -t 1 -g 4 -kl 0 -lr 1e-3 -ibs 6 -imbs 6 -tbs 6 -tMbs 6 -tmbs 24 -mnt 32 -mpt 256 -ei 4 -si 2 --max-steps 4"
)


@pytest.mark.full
def test_math_code_and_an_own_function_are_trained_together_and_resumed(make_tiny, start_run, tmp_path):
    model = make_tiny(tied=True, obeys=True)
    questions = [row["messages"] for row in lines(model / "train.jsonl")]
    for number, (name, truth) in enumerate(TRUTHS.items()):
        rows = [{"messages": question, **truth} for question in questions[number * 8 : number * 8 + 8]]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text(OWN)
    own = {**TASKS["three"], "reward_type": f"{tmp_path}/own.py:score", "correct_from": 2.0}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"tasks": {**TASKS, "three": own}}))
    files = [word for name in TASKS for word in ("-d", f"{name}={tmp_path}/{name}.jsonl")]
    evaluated = [word for name in ("math", "three") for word in ("-ed", f"{name}={tmp_path}/{name}.jsonl")]
    job = ("--config", tmp_path / "run.yaml", "-m", model, *files, *evaluated, *FLAGS.split(), "--master_port", 0)

    run = start_run(*job)
    records = assert_complete(run, steps=4)
    assert_engine_and_trainer_agree(records)
    samples = read_rollouts(run)
    for record in records:
        for name in TASKS:
            of_task = [line for line in samples if (line["step"], line["task"]) == (record["step"], name)]
            expected = sum(line["reward"] for line in of_task) / len(of_task) if of_task else None
            assert record[f"reward_mean/{name}"] == (None if expected is None else pytest.approx(expected))
        assert all(f"{key}/{name}" in record for key in OF_A_TASK for name in TASKS)
    for name, temperature in (("math", 1.2), ("code", 1.0), ("three", 0.8)):
        of_task = [line for line in samples if line["task"] == name]
        assert {line["temperature"] for line in of_task} == {temperature}
        assert len({line["verdict"] for line in of_task}) == 2, f"{name}: some are right, some are wrong"
    assert any(line["detail"] == "1 of 1 tests passed" for line in samples if line["task"] == "code")
    summary = lines(run.run_dir / "eval" / "summary.jsonl")
    assert {(line["step"], line["task"]) for line in summary} == {(s, t) for s in (0, 4) for t in ("math", "three")}

    resumed = start_run(*job, "-cp", run.run_dir / "checkpoints" / "step-2", name="resumed")
    assert resumed.wait() == 0, resumed.text()
    assert read_rollouts(resumed) == [line for line in samples if line["step"] > 2]
    manifests = [
        json.loads((each.run_dir / "checkpoints" / "step-4" / "manifest.json").read_text())["files"]
        for each in (run, resumed)
    ]
    weights = [{name: entry for name, entry in files.items() if "safetensors" in name} for files in manifests]
    assert weights[0] and weights[0] == weights[1]
    assert run.left_over() == resumed.left_over() == []
