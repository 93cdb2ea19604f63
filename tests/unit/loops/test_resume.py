"""Test that a run and its resumption together equal a run that was not interrupted."""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console

import rl_example
from coati_rl.config.cli import build_config
from coati_rl.driver.launch import _report_resumption
from coati_rl.observability.progress import ProgressDisplay
from coati_rl.work import FinishWork, SaveWork, SyncWork, TrainWork

EVERY_STEP = {"save_interval": 1, "inference_batch_size": 2}  # a sync and a checkpoint after each
ALL_PROMPTS = [f"train-{i}.0" for i in range(8)]


@pytest.fixture(scope="module")
def whole(run_in_threads):
    """The uninterrupted run of 4 steps with a checkpoint after each; K = 1."""
    return run_in_threads(EVERY_STEP)


@pytest.fixture(scope="module")
def resume(whole, run_in_threads, tmp_path_factory):
    """Step -> the trace of the run that goes on from that checkpoint, in a copy of the run's directory; made once."""
    traces = {}

    def run(step, **changes):
        key = repr((step, sorted(changes.items())))
        if key not in traces:
            run_dir = tmp_path_factory.mktemp("runs") / f"from-{step}"
            shutil.copytree(whole.paths.run_dir, run_dir)
            checkpoint = run_dir / "checkpoints" / f"step-{step}"
            fields = {"run_dir": str(run_dir), "checkpoint_path": str(checkpoint)}
            traces[key] = run_in_threads(EVERY_STEP | fields | changes)
            assert traces[key].paths.run_dir == run_dir
        return traces[key]

    return run


def trained(trace):
    """(step, uid) of every prompt that the run's files say was trained."""
    lines = [line for file in sorted(trace.paths.rollouts.iterdir()) for line in file.read_text().split("\n")[:-1]]
    return sorted(
        (record["step"], record["uid"])
        for record in map(json.loads, lines)
        if record["is_trained"] and record["sample"] == 0
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("step", [2, 1, 3])
def test_both_parts_together_train_every_prompt_once(resume, whole, step):
    trace = resume(step)
    assert sorted(uid for _, uid in trained(trace)) == ALL_PROMPTS
    assert [step for step, _ in trained(trace)] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert [record["step"] for record in trace.steps] == list(range(step + 1, 5))
    assert trace.of("finished")[0]["step"] == 4


def test_resumed_at_a_sync_the_run_is_bit_for_bit_the_uninterrupted_one(resume, whole):
    trace = resume(2)
    assert [type(work) for work in trace.work] == [
        SyncWork,  # the checkpoint's weights, before the first prompt
        *(TrainWork, SyncWork, SaveWork),
        *(TrainWork, SyncWork, SaveWork),
        FinishWork,
    ]
    assert trained(trace) == trained(whole)
    assert trace.responses == {uid: whole.responses[uid] for uid in trace.responses}
    for key in ("loss", "grad_norm", "learning_rate", "reward_mean", "logprob_gap_mean"):
        assert [record[key] for record in trace.steps] == [record[key] for record in whole.steps[2:]]
    for name, weight in whole.weights.items():
        torch.testing.assert_close(trace.weights[name], weight, rtol=0, atol=0)


def test_resumed_between_syncs_producers_have_the_checkpoints_weights_and_the_next_sync_comes_in_its_place(resume):
    trace = resume(1, inference_batch_size=4)  # K = 2 now
    assert [event["policy_version"] for event in trace.of("sync")] == [1, 2, 4]
    versions = {group.prompt.uid: group.oldest_version for group in trace.groups}
    assert sorted(versions.values()) == [1, 1, 2, 2, 2, 2]
    assert [record["staleness_max"] for record in trace.steps] == [0, 0, 0]


def test_the_abandoned_future_is_moved_aside(resume, whole):
    trace = resume(2)
    aside = trace.paths.run_dir / "discarded" / "after-step-2"
    assert sorted(path.name for path in (aside / "checkpoints").iterdir()) == ["step-3", "step-4"]
    assert {json.loads(line)["step"] for line in next((aside / "rollouts").iterdir()).open()} == {3, 4}
    assert (trace.paths.run_dir / "config-step-2.yaml").read_text() == (whole.paths.run_dir / "config.yaml").read_text()


def test_corrected_ground_truths_are_said_in_the_log_and_recorded(resume, whole, small_run, tmp_path, caplog):
    unchanged = resume(2)
    (record,) = map(json.loads, (unchanged.paths.run_dir / "resumes.jsonl").read_text().splitlines())
    assert (record["step"], record["checkpoint"]) == (2, str(unchanged.paths.checkpoints / "step-2"))
    assert not [change for change in record["changes"] if "ground truths" in change]

    corrected = tmp_path / "corrected.jsonl"
    corrected.write_text(Path(small_run["dataset"]).read_text().replace('"gt_answer": "1"', '"gt_answer": "2"', 1))
    trace = resume(2, dataset=str(corrected))
    (record,) = map(json.loads, (trace.paths.run_dir / "resumes.jsonl").read_text().splitlines())
    told = f"ground truths of --dataset {corrected} differ from those of the checkpoint's run"
    assert told in record["changes"]
    caplog.set_level("INFO", logger="coati_rl")
    shown = io.StringIO()
    _report_resumption(trace.prepared.resume, ProgressDisplay(None, Console(file=shown)))
    assert told in caplog.messages and told in shown.getvalue().splitlines()


def test_a_run_may_go_on_with_other_sizes(resume):
    # Six prompts are left: with 4 a step that is one step, and two are left over.
    trace = resume(1, train_batch_size=4, inference_batch_size=4)
    assert [record["step"] for record in trace.steps] == [2]
    assert trace.of("finished")[0] == {"event": "finished", "step": 2, "groups_dropped": 2, "groups_filtered": 0}
    assert trace.prepared.plan.num_steps == 2


def test_the_newest_checkpoint_of_a_run_directory_is_taken_and_more_episodes_go_on_from_the_end(
    whole, run_in_threads, tmp_path
):
    run_dir = tmp_path / "run"
    shutil.copytree(whole.paths.run_dir, run_dir)
    trace = run_in_threads({"run_dir": str(run_dir), "checkpoint_path": str(run_dir), "num_episodes": 2})
    assert [record["step"] for record in trace.steps] == [5, 6, 7, 8]
    assert sorted(uid for _, uid in trained(trace)) == sorted(
        f"train-{i}.{episode}" for i in range(8) for episode in (0, 1)
    )


@pytest.mark.full
def test_a_dry_run_says_from_where_it_would_go_on_and_moves_nothing(whole, small_run, tmp_path, capsys):
    checkpoint = whole.paths.checkpoints / "step-2"
    config = build_config({**small_run, **EVERY_STEP, "kl_coeff": 0.0, "checkpoint_path": str(checkpoint)})
    before = sorted(whole.paths.run_dir.rglob("*"))
    rl_example._run(config, True, tmp_path)
    assert capsys.readouterr().out.endswith(f"\nresumes from step 2 of {checkpoint}\n")
    assert sorted(whole.paths.run_dir.rglob("*")) == before
