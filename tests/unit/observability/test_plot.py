"""`coati-rl plot`: what is drawn of runs with producers and of jobs on a dataset, where, and what is refused."""

import json
from pathlib import Path

import pytest

from coati_rl.command_line import main
from coati_rl.observability.plot import axis_of, curves_of, default_name, labelled

RL = [{"step": 1, "reward_mean": 0.25, "answer_accuracy": 0.5, "loss": 0.0, "teacher_kl_mean": None}]
RL_EVALUATIONS = [{"step": 0, "task": "math", "accuracy": 0.125, "reward_mean": 0.125, "num_prompts": 8}]
SFT = [{"step": 1, "loss": 2.0, "perplexity": 7.4}, {"step": 2, "loss": 1.5, "perplexity": 4.5}]
SFT_EVALUATIONS = [{"step": 0, "task": "held", "loss": 2.5, "perplexity": 12.2, "loss_tokens": 9}]


def run(directory: Path, steps: list[dict], evaluations: list[dict] | None = None) -> Path:
    (directory / "eval").mkdir(parents=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    if evaluations is not None:
        (directory / "eval/summary.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluations))
    return directory


def test_of_a_run_with_producers_rewards_and_accuracies_are_drawn_and_its_loss_is_not(tmp_path) -> None:
    curves = curves_of(run(tmp_path / "rl", RL, RL_EVALUATIONS))
    expected = {"reward": [(1, 0.25)], "accuracy": [(1, 0.5)], "eval/math/accuracy": [(0, 0.125)]}
    assert curves == expected and default_name(curves) == "reward_curve.png"


def test_of_a_job_on_a_dataset_the_losses_are_drawn(tmp_path) -> None:
    curves = curves_of(run(tmp_path / "sft", SFT, SFT_EVALUATIONS))
    assert curves == {"loss": [(1, 2.0), (2, 1.5)], "eval/held/loss": [(0, 2.5)]}
    assert default_name(curves) == "loss_curve.png"


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("loss", "loss"),
        ("eval/my loss set/loss", "loss"),
        ("teacher KL", "KL, nats per token"),
        ("eval/loss/accuracy", "reward and accuracy"),
        ("reward", "reward and accuracy"),
    ],
)
def test_each_figure_has_the_axis_of_its_kind(name, axis) -> None:
    assert axis_of(name) == axis


def test_runs_of_the_same_name_are_told_apart_by_their_paths() -> None:
    assert labelled([Path("a/run"), Path("b/run"), Path("c/other")]) == {
        Path("a/run"): "a/run",
        Path("b/run"): "b/run",
        Path("c/other"): "other",
    }


@pytest.mark.full
def test_one_run_is_drawn_into_its_directory_and_several_into_the_figure_that_is_named(tmp_path, capsys) -> None:
    rl, sft = run(tmp_path / "rl", RL), run(tmp_path / "sft", SFT, SFT_EVALUATIONS)
    both = tmp_path / "both.png"
    assert main(["plot", str(sft)]) == 0
    assert main(["plot", str(rl), str(sft), "-o", str(both)]) == 0
    assert capsys.readouterr().out.split() == [str(sft / "loss_curve.png"), str(both)]
    for path in (sft / "loss_curve.png", both):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_line_that_is_cut_off_as_of_a_run_in_progress_is_left_out(tmp_path) -> None:
    directory = run(tmp_path / "sft", SFT)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert curves_of(directory) == {"loss": [(1, 2.0), (2, 1.5)]}


def test_what_cannot_be_drawn_is_refused_with_exit_code_2(tmp_path, capsys) -> None:
    rl, empty = run(tmp_path / "rl", RL), run(tmp_path / "empty", [])
    broken = run(tmp_path / "broken", RL, [{"step": 1}])
    for arguments, message in (
        ([tmp_path / "none"], f"{tmp_path}/none: has no metrics.jsonl; give the directory of a run"),
        ([empty], f"{empty}: no step and no evaluation is recorded yet"),
        ([broken], f"{broken}: its metrics.jsonl or eval/summary.jsonl cannot be read: 'task'"),
        (["x" * 300], f"{'x' * 300}: its metrics.jsonl or eval/summary.jsonl cannot be read: [Errno 36]"),
        ([rl, rl], "several runs are drawn in one figure: name it with -o FILE.png"),
        ([rl, "-o", tmp_path / "x.xyz"], f"-o {tmp_path}/x.xyz: cannot be written: Format 'xyz' is not supported"),
        ([rl, "-o", tmp_path / "no/x.png"], f"-o {tmp_path}/no/x.png: cannot be written: [Errno 2]"),
    ):
        assert main(["plot", *map(str, arguments)]) == 2
        assert capsys.readouterr().err.startswith(f"coati-rl plot: {message}")
