"""Replay steps of runs from their files: all stages agree, or the first one that differs is named."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from coati_rl.checkpoint.settings_files import keep_settings
from coati_rl.command_line import main
from coati_rl.errors import ConfigError
from tests.unit.loops.recorded_run import change_lines, copy_of, first_named, replay_of, write_metrics

KEPT = {
    "backend": "transformers",
    "num_generations": 4,
    "inference_batch_size": 2,
    "kl_coeff": 0.05,
    "save_interval": 1,
    "max_logprob_gap": 100.0,
}


STAGES = ("records", "prompt", "text", "reward", "advantage", "weights", "rollout logprobs")
STAGES += ("scores", "loss", "gradient", "update")


@pytest.fixture(scope="module")
def record(run_in_threads, parity_file):
    """Changes to the run's fields, options of its threads -> its directory."""

    def make(changes=None, **options):
        own = {"reward_type": f"{parity_file}:score", **KEPT, **(changes or {})}
        return write_metrics(run_in_threads(own, score=None, **options))

    return make


@pytest.fixture(scope="module")
def run_dir(record):
    return record()


@pytest.mark.parametrize("step", [4, *(pytest.param(step, marks=pytest.mark.full) for step in (1, 2, 3))])
def test_every_stage_of_every_step_agrees_with_what_the_run_wrote(run_dir, step):
    replay = replay_of(run_dir, has_workers=True)
    assert len(replay.records) == 4
    stages = [*replay.stages(step)]
    assert {stage.name: stage.verdict for stage in stages} == dict.fromkeys(STAGES, "agrees")


@pytest.mark.full
def test_steps_without_a_checkpoint_before_them_are_trained_again(run_dir, tmp_path):
    left = copy_of(run_dir, tmp_path / "run")
    for step in (1, 2, 3):
        (left / "checkpoints" / f"step-{step}").rename(tmp_path / f"step-{step}")
    stages = [*replay_of(left).stages(4)]
    assert {stage.verdict for stage in stages} == {"agrees"}
    assert "3 steps after it trained again" in next(stage.text for stage in stages if stage.name == "weights")


def test_a_resumed_run_is_replayed_without_the_checkpoint_that_it_was_resumed_from(run_dir, tmp_path):
    resumed = copy_of(run_dir, tmp_path / "run")
    gone = resumed / "checkpoints" / "step-2"
    config = yaml.safe_load((resumed / "config.yaml").read_text())
    (resumed / "config.yaml").write_text(yaml.safe_dump(config | {"checkpoint_path": str(gone)}))
    (resumed / "resumes.jsonl").write_text(json.dumps({"step": 2, "checkpoint": str(gone), "changes": []}) + "\n")
    gone.rename(tmp_path / "step-2")
    stages = [*replay_of(resumed).stages(3)]
    assert {stage.verdict for stage in stages} == {"agrees"}
    assert "step-1, 1 step after it trained again" in next(stage.text for stage in stages if stage.name == "weights")


def test_a_step_is_replayed_with_the_settings_that_it_was_trained_with(run_dir, tmp_path):
    resumed = copy_of(run_dir, tmp_path / "run")
    keep_settings(3, resumed / "discarded", run_dir=resumed)
    config = yaml.safe_load((resumed / "config.yaml").read_text())
    (resumed / "config.yaml").write_text(yaml.safe_dump(config | {"kl_coeff": 0.5}))
    replay = replay_of(resumed)
    verdicts = [next(stage.verdict for stage in replay.stages(step) if stage.name == "loss") for step in (3, 4)]
    assert verdicts == ["agrees", "differs"], "the fourth step was trained with 0.05, too"


@pytest.mark.full
def test_a_run_that_was_resumed_in_another_directory_begins_with_the_checkpoint_there(run_dir, tmp_path):
    other = copy_of(run_dir, tmp_path / "other")
    for name in ("checkpoints", "gradients"):
        (other / name).rename(tmp_path / name)
    own = [line for line in (other / "metrics.jsonl").read_text().splitlines(keepends=True) if '"step": 4' in line]
    (other / "metrics.jsonl").write_text("".join(own))
    there = str(run_dir / "checkpoints" / "step-3")
    # It was resumed once more since, from a checkpoint of its own, which is deleted.
    lines = [{"step": 3, "checkpoint": there}, {"step": 4, "checkpoint": str(other / "checkpoints" / "step-4")}]
    (other / "resumes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(each.directory, each.step) for each in replay_of(other).starts] == [(Path(there), 3)]
    verdicts = {stage.name: stage.verdict for stage in replay_of(other).stages(4)}
    assert (verdicts["weights"], verdicts["loss"]) == ("agrees", "agrees")


OF_KEPT_WEIGHTS = {
    "plain": {},
    "a policy before the update, of two steps": {"old_logprobs": "trainer", "inference_batch_size": 4},
    "a critic": {"algo": "PPO"},
    "adapters": {"lora_rank": 4, "lora_alpha": 8},
    "a moving reference": {"reference_update": "every=1,mix=0.5"},
}


@pytest.mark.full
@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=() if v == "plain" else pytest.mark.full) for v in OF_KEPT_WEIGHTS]
)
def test_steps_whose_weights_are_kept_are_not_trained_again(record, variant):
    run = record({"save_interval": -1, "keep_weights": "every=1", "max_steps": 4, **OF_KEPT_WEIGHTS[variant]})
    for step in (2, 3, 4):
        stages = {stage.name: stage for stage in replay_of(run).stages(step)}
        assert {name for name, stage in stages.items() if stage.verdict != "agrees"} == {"update"}
        assert stages["update"].text == "the weights before the step were kept without the optimizer's state"
        assert stages["weights"].text == f"step-{step - 1}, as they are on the disk"


@pytest.mark.full
def test_the_command_prints_stages_and_exits_by_what_it_found(run_dir, tmp_path, capsys):
    assert main(["replay", str(run_dir), "--step", "2"]) == 0
    assert capsys.readouterr().out.endswith("step 2: every stage agrees\n")
    uid = next(each.uid for each in replay_of(run_dir).run.rollouts(2))
    assert main(["replay", str(run_dir), "--step", "2", "--sample", uid]) == 0
    assert "gradient" not in capsys.readouterr().out
    assert main(["replay", str(run_dir), "--step", "9"]) == 2
    assert "metrics.jsonl has no such step" in capsys.readouterr().err
    changed = copy_of(run_dir, tmp_path / "run")
    change_lines(changed, lambda lines: lines[0].update(reward=9.0))
    assert main(["replay", str(changed), "--step", "1"]) == 1
    assert "step 1: the first stage that differs: reward: train-" in capsys.readouterr().out


@pytest.mark.full
def test_a_run_with_text_alone_is_refused(record):
    with pytest.raises(ConfigError, match="--rollout-detail full"):
        [*replay_of(record({"rollout_detail": "text", "max_steps": 1, "save_interval": -1})).stages(1)]


@pytest.mark.full
def test_ratios_of_the_tokens_are_written_and_the_largest_is_that_of_the_runs_loss(record, capsys):
    run = record({"inference_batch_size": 4, "max_steps": 2, "learning_rate": 1e-2})  # the second step is off-policy
    assert main(["replay", str(run), "--step", "2", "--ratios"]) == 0
    assert "ratios of the tokens: " in capsys.readouterr().out
    lines = [json.loads(line) for line in (run / "token_ratios" / "step-2.jsonl").read_text().splitlines()]
    rollouts = {(each.uid, each.sample): each for each in replay_of(run).run.rollouts(2)}
    assert {(line["uid"], line["sample"]) for line in lines} == {
        key for key, each in rollouts.items() if each.is_trained
    }
    assert all(len(line["ratios"]) == len(rollouts[line["uid"], line["sample"]].line["token_ids"]) for line in lines)
    largest = max(ratio for line in lines for ratio in line["ratios"] if ratio is not None)
    assert largest == pytest.approx(replay_of(run).records[2]["ratio_max"], rel=2e-5) and largest > 1.001


@pytest.mark.parametrize("given", [["--sample", "train-0.0"]])
def test_ratios_are_of_a_whole_step(run_dir, given, capsys):
    assert main(["replay", str(run_dir), "--step", "2", "--ratios", *given]) == 2
    assert "--ratios: is of the whole step" in capsys.readouterr().err


def swap_texts(run):
    def swap(lines):
        lines[0]["response"], lines[1]["response"] = lines[1]["response"], lines[0]["response"]

    change_lines(run, swap)


def lose_token(run):
    change_lines(run, lambda lines: lines[0]["token_ids"].pop())


def flip_mask(run):
    def flip(lines):
        lines[0]["loss_mask"] = [[False, 1], [True, len(lines[0]["token_ids"]) - 1]]

    change_lines(run, flip)


def scale_advantage(run):
    change_lines(run, lambda lines: [line.update(advantage=1.01 * line["advantage"]) for line in lines])


def relabel_version(run):
    def relabel(lines):
        for line in lines:
            if line["step"] == 3:
                line |= {"token_versions": [[0, len(line["token_ids"])]], "policy_versions": [0, 0]}

    change_lines(run, relabel)


def alter_weights(run):
    path = run / "checkpoints" / "step-2" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def lose_sample(run):
    change_lines(run, lambda lines: lines.pop(next(n for n, line in enumerate(lines) if line["step"] == 3)))


def change_temperature(run):
    change_lines(run, lambda lines: [line.update(temperature=0.9) for line in lines])


# What is changed in the files of a run, the step that is replayed, the stage that is named.
EDITS = [
    (swap_texts, 1, "text"),
    (lose_token, 1, "records"),
    (flip_mask, 1, "records"),
    (scale_advantage, 3, "advantage"),
    (relabel_version, 3, "rollout logprobs"),
    (alter_weights, 3, "weights"),
    (lose_sample, 3, "records"),
    (change_temperature, 2, "rollout logprobs"),
]


FIRST_OF_A_STAGE = {stage: edit for edit, _, stage in reversed(EDITS)}.values()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("edit", "step", "stage"),
    [pytest.param(*each, marks=() if each[0] in FIRST_OF_A_STAGE else pytest.mark.full) for each in EDITS],
    ids=[edit.__name__ for edit, *_ in EDITS],
)
def test_a_change_of_the_files_is_named_by_its_stage(run_dir, tmp_path, edit, step, stage):
    changed = copy_of(run_dir, tmp_path / "run")
    edit(changed)
    assert first_named(changed, step)[0] == stage


VARIANTS = {
    "adapters": {"lora_rank": 4, "lora_alpha": 8},
    "a critic": {"algo": "PPO", "kl_coeff": 0.0},
    "a critic with two updates": {"algo": "PPO", "kl_coeff": 0.05, "critic_updates": 2},
    "KL in the reward, whitened advantages": {"algo": "REINFORCE_PP"},
    "old log-probabilities of the trainer": {"old_logprobs": "trainer", "inference_batch_size": 4},
    "a correction of the mismatch": {"off_policy_correction": "tis", "inference_batch_size": 4},
    "a moving reference": {"reference_update": "every=2,mix=0.5"},
    "sequences": {"algo": "GSPO"},
    "lengths that are punished": {"algo": "DAPO", "kl_coeff": 0.0, "filter_range": None},
    "greedy baselines": {"advantage_estimator": "remax"},
}
FAST = ("adapters", "a critic")


@pytest.mark.full
@pytest.mark.parametrize("variant", [pytest.param(v, marks=() if v in FAST else pytest.mark.full) for v in VARIANTS])
def test_variants_of_runs_are_replayed(record, variant):
    replay = replay_of(record({"max_steps": 4, **VARIANTS[variant]}))
    for step in {*replay.records} - {2}:
        stages = [*replay.stages(step)]
        assert [stage.line for stage in stages if stage.verdict == "differs"] == []
        assert {"loss", "gradient"} <= {stage.name for stage in stages if stage.verdict == "agrees"}


@pytest.mark.full
def test_recording_changes_no_bit_of_the_training(run_in_threads):
    runs = [run_in_threads({"rollout_detail": detail}) for detail in ("full", "text")]
    recorded = [(trace.paths.run_dir / "gradients").is_dir() for trace in runs]
    assert recorded == [True, False]
    first, second = (trace.weights for trace in runs)
    assert all(torch.equal(first[name], second[name]) for name in first)
