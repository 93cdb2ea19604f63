"""Test each job on a dataset as a whole: what it trains, evaluates, saves, and that a resumed run is the same."""

import json
import math
import shutil

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from coati_rl.errors import ConfigError
from tests.unit.loops.offline_run import run_offline, write_rows
from tests.unit.loops.recorded_run import replay_of, write_steps

NUM_ROWS = 12
WORDS = ["ab", "cde", "f", "ghij", "kl", "m"]


def messages(number):
    return [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": WORDS[number % 6]}]


def pair(number):
    return {"prompt": f"q{number}", "chosen": WORDS[number % 3], "rejected": WORDS[3 + number % 3]}


def rollout(number):
    """A prompt of two tokens, then three of which one is a tool's; right answers begin with another token."""
    token_ids = [70 + number % 2, 80, 90 + number % 3]
    given = {"prompt_token_ids": [60, 61], "token_ids": token_ids, "turns": [[0, 1, "stop"], [2, 3, "length"]]}
    known = {"step": 1, "uid": f"train-{number}.0", "sample": 0, "episode": 0, "response": "", "verdict": "ok"}
    mask = [[True, 1], [False, 1], [True, 1]]
    return {**known, **given, "loss_mask": mask, "reward": float(number % 2), "token_rewards": [[0, "env", 0.25]]}


ROWS = {
    "sft": lambda number: {"messages": messages(number)},
    "rm": pair,
    "dpo": pair,
    "kto": lambda number: {"prompt": f"q{number}", "completion": WORDS[number % 6], "label": number % 2 == 0},
    "prm": lambda number: {"prompt": f"q{number}", "completions": ["ab", "cd"], "labels": [True, number % 2 == 0]},
    "value": rollout,
}
OWN = {"prm": {"placeholder_token": "#", "reward_tokens": ["+", "-"]}, "kto": {"train_batch_size": 4}}
METRICS = {
    "sft": {"perplexity"},
    "rm": {"rewards/accuracies", "rewards/margins"},
    "dpo": {"rewards/accuracies", "rewards/margins"},
    "kto": {"rewards/margins", "kl"},
    "prm": {"step_accuracy"},
    "value": {"explained_variance", "value_mean", "return_mean"},
}


@pytest.fixture(scope="module")
def values_of(model_dir, tmp_path_factory):
    """(job, changes) -> the fields of a small one: 12 rows, 4 a step, 2 epochs, a checkpoint every 2 of the 6 steps."""

    def make(job, **changes):
        folder = tmp_path_factory.mktemp(job)
        return {
            "model": str(model_dir),
            "dataset": write_rows(folder / "train.jsonl", [ROWS[job](number) for number in range(NUM_ROWS)]),
            "eval_dataset": write_rows(folder / "held.jsonl", [ROWS[job](number) for number in range(100, 107)]),
            "device": "cpu",
            "train_batch_size": 4,
            "train_microbatch_size": 2,
            "max_epochs": 2,
            "eval_interval": 3,
            "save_interval": 2,
            "learning_rate": 1e-2,
            "run_dir": str(folder / "run"),
            **OWN.get(job, {}),
            **changes,
        }

    return make


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "job", [pytest.param(job, marks=pytest.mark.full) if job in ("kto", "prm") else job for job in ROWS]
)
def test_a_job_learns_evaluates_and_goes_on_bit_for_bit_after_a_kill(values_of, tmp_path, job):
    values = values_of(job)
    whole = run_offline(job, values)
    steps = whole.of("step")
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert all(math.isfinite(record["loss"]) for record in steps)
    assert [record["epoch"] for record in steps] == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2])
    evaluations = whole.of("evaluation")
    assert [(event["step"], event["task"]) for event in evaluations] == [(0, "eval"), (3, "eval"), (6, "eval")]
    assert METRICS[job] | {"loss"} <= evaluations[0]["metrics"].keys()
    assert evaluations[-1]["metrics"]["loss"] < evaluations[0]["metrics"]["loss"]
    lines = (whole.run_dir / "eval" / "summary.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": event["step"], "task": "eval", **event["metrics"]} for event in evaluations
    ]

    # Killed after step 4: what came later is not there.
    run_dir = tmp_path / "run"
    shutil.copytree(whole.run_dir, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step-6")
    resumed = run_offline(job, values | {"run_dir": str(run_dir), "checkpoint_path": str(run_dir)})
    assert resumed.run_dir == run_dir
    assert [record["step"] for record in resumed.of("step")] == [5, 6]
    assert [event["step"] for event in resumed.of("evaluation")] == [6]
    assert resumed.files(6) == whole.files(6) and whole.files(6)
    assert resumed.of("evaluation")[-1] == evaluations[-1]


@pytest.mark.full
@pytest.mark.parametrize("job", [job if job == "dpo" else pytest.param(job, marks=pytest.mark.full) for job in ROWS])
def test_the_steps_of_a_job_are_replayed(values_of, job):
    trace = run_offline(job, values_of(job))
    replay = replay_of(write_steps(trace.run_dir, trace.of("step")))
    for step in (1, 4, 5):
        stages = {stage.name: stage for stage in replay.stages(step)}
        assert [stage.line for stage in stages.values() if stage.verdict == "differs"] == []
        compared = ("rows", "tokens", "weights", "loss", "gradient")
        assert [stages[name].verdict for name in compared] == ["agrees"] * len(compared)


@pytest.mark.parametrize("job", ["dpo", pytest.param("kto", marks=pytest.mark.full)])
def test_a_reference_computed_first_gives_the_same_weights_is_freed_and_is_read_on_resume(values_of, tmp_path, job):
    values = values_of(job, eval_interval=3)
    held = run_offline(job, values)
    assert held.models_at_start == held.models_at_end == {"policy", "reference"}
    fields = {"precompute_reference": True, "run_dir": str(tmp_path / "first")}
    first = run_offline(job, values | fields)
    assert (first.models_at_start, first.models_at_end) == ({"policy", "reference"}, {"policy"})
    losses = [[record["loss"] for record in trace.of("step")] for trace in (held, first)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)  # the reference is scored in other micro-batches

    path = first.run_dir / "reference_logprobs.npz"
    written = path.stat().st_mtime_ns
    resumed = run_offline(job, values | fields | {"checkpoint_path": str(first.run_dir / "checkpoints" / "step-4")})
    assert resumed.files(6) == first.files(6)
    assert path.stat().st_mtime_ns == written


def test_a_stopped_job_saves_its_last_step_and_goes_on_to_the_same_weights(values_of, tmp_path):
    values = values_of("sft", save_interval=-1, eval_interval=-1)
    whole = run_offline("sft", values)
    stopped = run_offline("sft", values | {"run_dir": str(tmp_path / "stopped")}, stop_after=2)
    last = stopped.of("step")[-1]["step"]
    assert stopped.of("checkpoint")[-1]["step"] == last in (2, 3), "one step may have been decided before"
    resumed = run_offline("sft", values | {"checkpoint_path": str(stopped.run_dir)})
    assert resumed.files(6) == whole.files(6)


def test_an_sft_checkpoint_is_the_model_of_a_reward_model(values_of):
    small = {"max_steps": 1, "eval_interval": -1}
    sft = run_offline("sft", values_of("sft", **small))
    rm = run_offline("rm", values_of("rm", model=str(sft.run_dir / "checkpoints" / "step-1"), **small))
    config = json.loads((rm.run_dir / "checkpoints" / "step-1" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]


@pytest.fixture(scope="module")
def first_steps(values_of):
    """The fields of a job of two steps, and its trace."""
    values = values_of("sft", max_steps=2, eval_interval=-1)
    return values, run_offline("sft", values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, r"--seed 1: .* draws its rows in the order of seed 0; use --seed 0"),
        ({"train_batch_size": 2}, r"-tbs 2: tbs \* dp = 2 rows per step, .* has 4, .*; use -tbs 4"),
        ({"max_length": 10}, r"--dataset .*: not the rows of --checkpoint-path .* \(12 rows here, 12 there, as they"),
        ({"max_epochs": 1, "max_steps": 2}, r"nothing is left to do, .* is at step 2 of 2; raise --max-epochs"),
        ({"model": "other"}, r"its model differs from --model .*: hidden_size"),
    ],
)
def test_a_checkpoint_is_refused_where_the_run_differs(first_steps, tmp_path, model_dir, changes, message):
    values, first = first_steps
    if changes.get("model") == "other":
        changes = {"model": str(shutil.copytree(model_dir, tmp_path / "other"))}
        config = AutoConfig.from_pretrained(model_dir, hidden_size=128)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
    changes = {"max_steps": 6} | changes
    with pytest.raises(ConfigError, match=message):
        run_offline("sft", values | {"checkpoint_path": str(first.run_dir)} | changes)


def test_a_checkpoint_of_another_job_is_refused(values_of, first_steps):
    _, first = first_steps
    with pytest.raises(
        ConfigError, match=r"is a checkpoint of coati-rl sft, not of coati-rl dpo; start from its weights"
    ):
        run_offline("dpo", values_of("dpo", checkpoint_path=str(first.run_dir)))


def test_other_shares_of_the_sources_are_refused_before_anything_starts(values_of, tmp_path):
    values = values_of("sft", max_steps=2, eval_interval=-1)
    other = write_rows(tmp_path / "other.jsonl", [ROWS["sft"](number) for number in range(50, 54)])
    mixed = f"{values['dataset']}=0.75,{other}=0.25"
    first = run_offline("sft", values | {"dataset": mixed})
    fields = {"dataset": f"{values['dataset']}=0.5,{other}=0.5", "checkpoint_path": str(first.run_dir), "max_steps": 4}
    with pytest.raises(ConfigError, match=r"were mixed by shares .*; use that run's shares"):
        run_offline("sft", values | fields)
    assert [record["step"] for record in run_offline("sft", values | fields | {"dataset": mixed}).of("step")] == [3, 4]
