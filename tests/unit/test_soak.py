"""Test what a soak finds in the files of a run: steps, samples that were trained twice, prompts that were lost."""

import elastic
import pytest
import soak
from soak import found_in

from tests.run_files import write_run_in

# Two prompts a step over a data set of four: each pass takes two steps; both samples of a group are trained.
PROMPTS = [f"train-{row}.{number}" for number in range(4) for row in range(4)]


def lines(uids=PROMPTS):
    return [
        {"step": place // 2 + 1, "uid": uid, "sample": sample, "producer": place % 2}
        for place, uid in enumerate(uids)
        for sample in range(2)
    ]


@pytest.fixture
def found(tmp_path):
    """(steps, lines of the rollouts) -> what a soak finds."""

    def found(rollouts, steps=({},) * 8):
        run = write_run_in(tmp_path, steps=steps, rollouts=rollouts)
        run.with_suffix(".out").write_text("\nthe coordinator was lost; another goes on\n")
        return found_in(run, n_behind=1, num_prompts=4)

    return found


def test_a_run_that_lost_nothing_has_no_problem(found):
    counts, problems = found(lines())
    assert problems == []
    expected = {"steps": 8, "prompts": 16, "passes_that_are_over": 2, "samples_trained": 32, "takeovers": 1}
    assert counts.items() >= {**expected, "producers_whose_samples_are_trained": 2}.items()


def test_a_prompt_that_a_pass_lacks_is_lost(found):
    _, problems = found(lines([uid for uid in PROMPTS if uid != "train-2.1"]))
    assert any("passes that are over, by their number of prompts, which is not 4: {1: 3}" in each for each in problems)


def test_a_prompt_that_every_pass_lacks_is_lost(found):
    _, problems = found(lines([uid for uid in PROMPTS if not uid.startswith("train-2.")]))
    assert any("which is not 4: {0: 3, 1: 3}" in each for each in problems)


def test_the_last_two_passes_may_lack_prompts_that_are_being_sampled(found):
    assert found(lines(PROMPTS[:9]), steps=({},) * 5)[1] == []


def test_a_sample_that_was_trained_twice_is_named(found):
    _, problems = found([*lines(), {**lines()[0], "step": 8}])
    assert problems == ["trained more than once: [('train-0.0', 0)]"]


def test_a_step_without_record_or_rollouts_and_a_sample_that_is_too_old_are_named(found):
    _, problems = found(lines(PROMPTS[:14]), steps=[{}, {"staleness_max": 2}, *[{}] * 5, {"step": 9}])
    assert problems == [
        "steps are not 1, 2, 3, ... in metrics.jsonl",
        "steps without rollouts: [9]",
        "steps with samples older than 1 weight syncs: [2]",
    ]


@pytest.mark.parametrize("script", [soak, elastic])
def test_a_directory_that_exists_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys, script):
    where = {soak: ["1", "--run-dir"], elastic: ["--output"]}[script]
    monkeypatch.setattr("sys.argv", ["it", *where, str(tmp_path), "--model", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert f"{tmp_path}: exists" in capsys.readouterr().err
