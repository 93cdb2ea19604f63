"""Test -cp: the point from which a run is resumed, and refusals."""

import json
import shutil
from dataclasses import asdict, replace

import pytest
import yaml

from coati_rl.checkpoint.directory import ROLLOUTS_FILE, write_manifest, write_state
from coati_rl.checkpoint.position import Position, data_state
from coati_rl.checkpoint.resume import open_resume_point
from coati_rl.checkpoint.untrained_rollouts import FinishedGroup, UntrainedRollouts
from coati_rl.config.cli import parse
from coati_rl.errors import ConfigError
from coati_rl.generator_spec import parse_generator
from coati_rl.reading.draw_order import DrawOrder, fingerprint, ground_truth_digest
from coati_rl.reading.endless_prompts import EndlessPrompts, GeneratedPrompts
from coati_rl.reading.generators import open_generator
from coati_rl.reading.prompt_source import DatasetPrompts
from coati_rl.reading.tasks import Task

SIZES = "-t 1 -i 1 -ibs 2 -imbs 1 -tbs 2 -tMbs 1 -tmbs 1 -g 2 -d data.jsonl"


def source(prompts):
    return DatasetPrompts(prompts, num_episodes=1, seed=0)


@pytest.fixture
def checkpoint(model_dir, make_prompts, tmp_path):
    """Of step 3 of a run over 10 prompts, 2 a step, of which one was drawn and not trained."""
    path = tmp_path / "run" / "checkpoints" / "step-3"
    path.mkdir(parents=True)
    shutil.copy(model_dir / "config.json", path)
    position = Position(step=3, num_drawn=7, waiting=("train-4.0",))
    prompts = make_prompts(10)
    digests = {"fingerprint": fingerprint(prompts), "ground_truths": ground_truth_digest(prompts)}
    order = DrawOrder(seed=0, num_prompts=10, **digests)
    write_state(path, {"step": 3, "policy_version": 3, "data": data_state(position, order)})
    write_manifest(path)
    return path


@pytest.fixture
def resume(checkpoint, model_dir, make_prompts):
    def run(flags="", *, num_prompts=10, model=model_dir, known=True):
        config = parse([*f"-m {model} -cp {checkpoint} {SIZES} {flags}".split()])[0]
        return open_resume_point(config, source(make_prompts(num_prompts)) if known else None, num_prompts=num_prompts)

    return run


@pytest.fixture
def refusal(resume):
    def run(*args, **options):
        with pytest.raises(ConfigError) as caught:
            resume(*args, **options)
        return str(caught.value)

    return run


@pytest.fixture
def ahead(checkpoint, model_dir, group_of):
    """The checkpoint of a run that was ahead: the prompt is finished there, and the settings are known."""
    state = json.loads((checkpoint / "state.json").read_text())
    state["data"]["position"] |= {"waiting": ["train-2.0"], "kept": ["train-4.0"]}
    (checkpoint / "state.json").write_text(json.dumps(state))
    group = group_of([(1.0, 2), (0.0, 3)], uid="train-4.0")
    kept = UntrainedRollouts(finished=(FinishedGroup(group=group, sync_index=-1),), sync_index_of={7: -1})
    (checkpoint / ROLLOUTS_FILE).write_bytes(kept.to_bytes())
    write_manifest(checkpoint)
    config = parse([*f"-m {model_dir} {SIZES}".split()])[0].flat("json")
    (checkpoint.parents[1] / "config.yaml").write_text(yaml.safe_dump(config))
    return checkpoint


def test_without_the_flag_a_run_starts_at_the_beginning(make_prompts):
    assert open_resume_point(parse([])[0], source(make_prompts(1)), num_prompts=1) is None


def test_a_checkpoint_is_a_position_and_the_steps_that_are_left(resume, checkpoint):
    point = resume()
    assert (point.directory, point.position.step, point.position.waiting) == (checkpoint, 3, ("train-4.0",))
    assert point.num_steps == 5, "ten prompts, two a step"
    assert point.line() == f"resumes from step 3 of {checkpoint}"


@pytest.mark.parametrize(("flags", "num_steps"), [("-e 2", 10), ("--max-steps 4", 4), ("-tbs 1", 7), ("-tbs 4", 4)])
def test_the_number_of_steps_follows_from_what_is_left(resume, flags, num_steps):
    assert resume(flags).num_steps == num_steps


def test_another_seed_is_refused(refusal):
    assert refusal("--seed 1").endswith("draws its prompts in the order of seed 0; use --seed 0")


def test_other_prompts_are_refused_with_what_may_have_changed_them(refusal):
    message = refusal(num_prompts=9)
    assert message.startswith("--dataset data.jsonl: not the prompts of --checkpoint-path")
    assert "(9 prompts here, 10 there)" in message
    assert "--system-prompt, --reward-type and --max-prompt-tokens, or start from the weights alone" in message


def test_as_many_prompts_with_other_tokens_are_refused_too(checkpoint, model_dir, make_prompts):
    config = parse([*f"-m {model_dir} -cp {checkpoint} {SIZES}".split()])[0]
    first, *others = make_prompts(10)
    changed = [replace(first, token_ids=(*first.token_ids, 4)), *others]
    with pytest.raises(ConfigError, match=r"not the prompts of .* \(10 prompts here, 10 there\)"):
        open_resume_point(config, source(changed), num_prompts=10)


def test_the_fingerprint_sees_uids_and_tokens_but_not_answers(make_prompts):
    first, *others = make_prompts(3)
    same = fingerprint([first, *others])
    assert fingerprint([replace(first, ground_truth="corrected"), *others]) == same
    assert fingerprint([replace(first, token_ids=(1, 2, 4)), *others]) != same
    assert fingerprint([replace(first, uid="other"), *others]) != same
    assert fingerprint(others) != same


def test_another_models_shape_is_refused_by_its_numbers(refusal, model_dir, tmp_path):
    config = json.loads((model_dir / "config.json").read_text())
    size = config["intermediate_size"]
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "config.json").write_text(json.dumps(config | {"intermediate_size": 2 * size}))
    message = refusal(model=tmp_path / "wide")
    assert f"its model differs from --model {tmp_path / 'wide'}: " in message
    assert f": intermediate_size {size} instead of {2 * size}; use the --model of that run" in message


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--max-steps 3", "is at step 3 already; --max-steps counts all steps of the run, so raise it"),
        ("-ibs 8 -tbs 8", "leaves 4 prompts, and an optimizer step takes 8; raise --num-episodes"),
    ],
)
def test_a_run_with_nothing_left_to_do_is_refused(refusal, flags, reason):
    message = refusal(flags)
    assert "nothing is left to do" in message and message.endswith(reason)


def test_a_dry_run_without_the_model_believes_the_checkpoint(resume, tmp_path):
    assert resume(num_prompts=10, known=False, model="nobody/nothing").num_steps == 5


def test_a_checkpoint_of_another_version_is_refused(refusal, checkpoint):
    state = json.loads((checkpoint / "state.json").read_text())
    del state["data"]["position"]["waiting"]
    (checkpoint / "state.json").write_text(json.dumps(state))
    write_manifest(checkpoint)
    assert "position has other fields than this version's: waiting; start from its weights with --model" in refusal()
    (checkpoint / "state.json").write_text(json.dumps({"step": 3}))
    write_manifest(checkpoint)
    assert "is not a checkpoint to resume from" in refusal()


def test_settings_that_decide_the_experiment_are_compared_and_the_layout_is_not(resume, checkpoint, model_dir):
    run_config = parse([*f"-m {model_dir} {SIZES}".split()])[0].flat("json")
    (checkpoint.parents[1] / "config.yaml").write_text(yaml.safe_dump(run_config))
    assert resume("-si 7 -tMbs 2").changes == ()
    assert resume("-t 2 -tbs 1").changes == (), "tbs * dp is what it was"
    assert resume("-lr 1e-5 -ibs 4").changes == (
        f"learning_rate was {run_config['learning_rate']!r} and is 1e-05 now",
        "sync_period was 1 and is 2 now",
    )


@pytest.fixture
def open_with(checkpoint, model_dir):
    """Prompts -> what is told of a resumption with them, besides settings."""
    run_config = parse([*f"-m {model_dir} {SIZES}".split()])[0].flat("json")
    (checkpoint.parents[1] / "config.yaml").write_text(yaml.safe_dump(run_config))
    config = parse([*f"-m {model_dir} -cp {checkpoint} {SIZES}".split()])[0]
    return lambda prompts: open_resume_point(config, source(prompts), num_prompts=10).changes


def test_ground_truths_that_changed_are_told(open_with, make_prompts):
    first, *others = make_prompts(10)
    assert open_with([first, *others]) == ()
    (change,) = open_with([replace(first, ground_truth="corrected"), *others])
    assert change == "ground truths of --dataset data.jsonl differ from those of the checkpoint's run"


def test_ground_truths_that_only_move_from_a_prompt_to_another_have_changed_too(make_prompts):
    first, second = make_prompts(2)
    pairs = [("1", "23"), ("12", "3"), ("23", "1"), ("", "123")]
    digests = [ground_truth_digest([replace(first, ground_truth=a), replace(second, ground_truth=b)]) for a, b in pairs]
    assert len(set(digests)) == len(pairs)


def test_a_checkpoint_from_before_ground_truths_were_digested_is_resumed_and_that_is_told(
    open_with, checkpoint, make_prompts
):
    state = json.loads((checkpoint / "state.json").read_text())
    del state["data"]["draw_order"]["ground_truths"], state["format_version"]
    (checkpoint / "state.json").write_text(json.dumps(state))
    write_manifest(checkpoint)
    (change,) = open_with(make_prompts(10))
    assert change.startswith("ground truths are not compared")


def test_a_checkpoint_from_before_rollouts_were_kept_samples_again_what_was_finished(resume, checkpoint):
    state = json.loads((checkpoint / "state.json").read_text())
    del state["data"]["position"]["kept"], state["format_version"]
    (checkpoint / "state.json").write_text(json.dumps(state))
    write_manifest(checkpoint)
    point = resume()
    assert (point.position.waiting, point.position.kept, point.untrained) == (("train-4.0",), (), UntrainedRollouts())


def test_a_checkpoint_of_a_later_format_is_refused_before_anything_else(refusal, checkpoint):
    (checkpoint / "state.json").write_text(json.dumps({"format_version": 99, "other": 1}))
    write_manifest(checkpoint)
    assert refusal("--seed 1").startswith(f"--checkpoint-path {checkpoint}: its format has version 99, and this")


def test_a_checkpoint_without_its_runs_configuration_cannot_be_compared(resume, checkpoint):
    (change,) = resume().changes
    path = checkpoint.parents[1] / "config.yaml"
    assert change.startswith(f"settings are not compared with the checkpoint's run: {path} cannot be read: [Errno 2]")


def test_finished_rollouts_are_gone_on_with_under_the_datasets_prompts(ahead, resume, make_prompts):
    point = resume()
    (finished,) = point.untrained.finished
    assert finished.group.prompt == replace(make_prompts(10)[4], uid="train-4.0")
    assert (finished.sync_index, point.untrained.sync_index_of) == (-1, {7: -1})
    assert (point.position.waiting, point.position.kept, point.num_steps) == (("train-2.0",), ("train-4.0",), 5)


def test_kept_rollouts_are_sampled_again_when_settings_have_changed(ahead, resume):
    point = resume("-temp 0.7")
    assert point.untrained == UntrainedRollouts()
    assert (point.position.waiting, point.position.kept) == (("train-2.0", "train-4.0"), ())
    assert point.changes == (
        "temperature was 1.0 and is 0.7 now",
        "1 prompts with finished rollouts are therefore sampled again",
    )
    assert point.num_steps == 5


def test_rollouts_that_are_not_those_of_the_state_are_refused(ahead, refusal):
    (ahead / ROLLOUTS_FILE).write_bytes(UntrainedRollouts().to_bytes())
    write_manifest(ahead)
    assert refusal().endswith(f"{ahead}: rollouts.npz cannot be used: its prompts are not those in the state")
    (ahead / ROLLOUTS_FILE).write_bytes(b"no archive")
    write_manifest(ahead)
    assert "rollouts.npz cannot be used: " in refusal()


def test_a_dry_run_counts_finished_rollouts_without_reading_them(ahead, resume):
    assert resume(known=False, model="nobody/nothing").num_steps == 5


def test_what_changed_in_a_task_is_told_and_old_configurations_have_none(resume, checkpoint, model_dir):
    def write(flags):
        config = parse([*f"-m {model_dir} {SIZES} {flags}".split()])[0].flat("json")
        config.pop("tasks") if not flags else None
        (checkpoint.parents[1] / "config.yaml").write_text(yaml.safe_dump(config))

    before = '{"math":{"reward_type":"boxed","temperature":0.5},"old":{}}'
    now = '{"math":{"reward_type":"code","top_k":5},"new":{}}'
    write(f"--tasks {before}")
    assert resume(f"--tasks {now}").changes == (
        "task math: reward_type was 'boxed' and is 'code' now",
        "task math: temperature was 0.5 and is the run's now",
        "task math: top_k was the run's and is 5 now",
        "task old is no longer defined now",
        "task new is defined now",
    )
    assert resume(f"--tasks {before}").changes == ()
    write("")
    assert resume().changes == ()


def test_a_run_on_generated_rows_is_resumed_by_its_generator_and_not_by_another(checkpoint, model_dir, tokenizer):
    def endless(text):
        generated = GeneratedPrompts(
            name="train",
            generator=open_generator(parse_generator(text), seed=0, where=""),
            task=Task(truth=None),
            tokenizer=tokenizer,
            max_prompt_tokens=500,
            input_template=None,
        )
        return EndlessPrompts({"train": generated}, seed=0)

    sums = "reasoning_gym:chain_sum"
    state = json.loads((checkpoint / "state.json").read_text())
    state["data"]["draw_order"] = asdict(endless(sums).order)
    (checkpoint / "state.json").write_text(json.dumps(state))
    write_manifest(checkpoint)
    config = parse([*f"-m {model_dir} -cp {checkpoint} {SIZES} -d {sums} --max-steps 9".split()])[0]
    point = open_resume_point(config, endless(sums), num_prompts=None)
    assert (point.step, point.num_steps, point.position.num_drawn) == (3, 9, 7)
    with pytest.raises(ConfigError, match=r"not the prompts of .* \(endless prompts here, endless there\)"):
        open_resume_point(config, endless(f"{sums}?max_terms=3"), num_prompts=None)
