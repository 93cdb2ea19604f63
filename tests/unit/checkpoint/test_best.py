"""Test which checkpoint is named the best, by evaluations and checkpoints that exist, and that it is not deleted."""

import json

import pytest

from coati_rl.checkpoint.best import BestCheckpoint
from coati_rl.checkpoint.directory import STATE_FILE, checkpoints_in, find_checkpoint, prune
from coati_rl.errors import RunError


@pytest.fixture
def run(tmp_path):
    """The best by some metric of a run directory that the other functions fill."""
    for name in ("checkpoints", "eval"):
        (tmp_path / name).mkdir()
    return lambda metric="eval/math/accuracy": BestCheckpoint(
        metric=metric, checkpoints=tmp_path / "checkpoints", evaluation=tmp_path / "eval"
    )


def save(best, step, keep=None):
    path = best.checkpoints / f"step-{step}"
    path.mkdir()
    (path / STATE_FILE).write_text("{}")
    if keep is not None:
        prune(best.checkpoints, keep)


def evaluate(best, step, value, *, name="math", key="accuracy", versions=None):
    summary = {"step": step, "task": name, "policy_versions": versions or [step], key: value, "num_prompts": 4}
    with (best.evaluation / "summary.jsonl").open("a") as file:
        file.write(json.dumps(summary) + "\n")


def named(best):
    link, record = best.checkpoints / "best", best.checkpoints / "best.json"
    assert link.is_symlink() == record.is_file()
    if not link.is_symlink():
        return None
    content = json.loads(record.read_text())
    assert link.resolve().name == f"step-{content['step']}" and content["metric"] == best.metric
    return content["step"], content["value"]


def test_the_largest_value_is_the_best_and_the_earliest_of_equal_ones(run):
    best = run()
    assert best.update() is None and named(best) is None
    for step, value in [(2, 0.25), (4, 0.5), (6, 0.5), (8, 0.0)]:
        save(best, step)
        evaluate(best, step, value)
        evaluate(best, step, 1.0 - value, name="other")
        best.update()
    assert named(best) == (4, 0.5)


def test_an_evaluation_whose_metric_has_no_value_is_passed_over(run):
    best = run("eval/math/reward_mean")
    save(best, 2)
    evaluate(best, 2, None, key="reward_mean")
    assert best.update() is None and named(best) is None, "no answer has a verdict"
    save(best, 4)
    evaluate(best, 4, -1.5, key="reward_mean")
    best.update()
    assert named(best) == (4, -1.5)
    with pytest.raises(RunError, match=r"eval/math/loss: is no metric of the evaluations; use one"):
        run("eval/math/loss").update()


def test_only_a_new_best_is_told(run):
    best = run()
    told = []
    for step, value in [(2, 0.25), (4, 0.125), (6, 0.5)]:
        save(best, step)
        evaluate(best, step, value)
        told.append(best.update())
    assert told == [
        {"step": 2, "metric": "eval/math/accuracy", "value": 0.25},
        None,
        {"step": 6, "metric": "eval/math/accuracy", "value": 0.5},
    ]


@pytest.mark.parametrize("key", ["loss", "perplexity", "nll_loss", "kl"])
def test_of_a_loss_a_perplexity_and_a_divergence_the_smallest_is_the_best(run, key):
    best = run(f"eval/math/{key}")
    for step, value in [(2, 3.5), (4, 1.5), (6, 2.5)]:
        save(best, step)
        evaluate(best, step, value, key=key)
    best.update()
    assert named(best) == (4, 1.5)


def test_a_checkpoint_without_an_evaluation_of_its_own_weights_is_no_candidate(run):
    best = run()
    for step in (2, 4, 6):
        save(best, step)
    evaluate(best, 0, 0.9)  # there is no checkpoint of step 0
    evaluate(best, 2, 0.25)
    evaluate(best, 4, 0.75, versions=[4, 6])  # some answers are of newer weights
    best.update()
    assert named(best) == (2, 0.25)


def test_the_best_is_kept_besides_the_newest_and_goes_when_another_one_is_better(run):
    best = run()
    kept = []
    for step, value in [(2, 0.5), (4, 0.25), (6, 0.125), (8, 0.75), (10, 0.0)]:
        save(best, step, keep=2)
        evaluate(best, step, value)
        best.update()
        kept.append([path.name for path in checkpoints_in(best.checkpoints)])
    assert kept[2] == ["step-2", "step-4", "step-6"]
    assert kept[3] == ["step-2", "step-6", "step-8"], "step 8 was written before its evaluation was complete"
    assert kept[4] == ["step-8", "step-10"]


def test_a_run_that_goes_on_from_an_earlier_checkpoint_finds_the_best_of_what_is_left(run, tmp_path):
    best = run()
    for step, value in [(2, 0.25), (4, 0.125), (6, 0.5)]:
        save(best, step)
        evaluate(best, step, value)
    best.update()
    (best.checkpoints / "step-6").rename(tmp_path / "discarded")
    best.update()
    assert named(best) == (2, 0.25)
    for step in (2, 4):
        (best.checkpoints / f"step-{step}").rename(tmp_path / f"discarded-{step}")
    best.update()
    assert named(best) is None


def test_the_link_is_a_checkpoint_to_go_on_from(run):
    best = run()
    save(best, 4)
    evaluate(best, 4, 0.5)
    best.update()
    assert find_checkpoint(best.checkpoints / "best").name == "step-4"


def test_a_truncated_last_line_of_a_killed_run_is_passed_over(run):
    best = run()
    save(best, 4)
    evaluate(best, 4, 0.5)
    with (best.evaluation / "summary.jsonl").open("a") as file:
        file.write('{"step": 4, "ta')
    best.update()
    assert named(best) == (4, 0.5)


def test_what_cannot_be_written_is_told_with_the_path(run):
    best = run()
    save(best, 4)
    evaluate(best, 4, 0.5)
    (best.checkpoints / ".best.partial").mkdir()
    with pytest.raises(RunError, match=f"{best.checkpoints} cannot be written: Is a directory"):
        best.update()
