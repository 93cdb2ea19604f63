"""Test the recipes on SmolLM2 without training: their commands, what each reads, the word problems, the report."""

import json
import random
import re
import subprocess
from pathlib import Path

import pytest
import recipe_report
import style_task
import word_problem_task
from recipe_report import RECIPES, Claim, draw, shortfalls, table

from producer.tools.calculator import calculate
from tests.unit.recorded_script import check_job, inputs, make_repository, recorded_calls, run_script

JOBS = {
    "sft_dpo": ["generate", "sft", *["generate"] * 4, *["dpo", "generate"] * 2],
    "reward_model": ["generate", "generate", *["rm", "rl"] * 2],
    "tool_use": ["sft", *["rl", "generate"] * 2],
}
FILES = ("train.jsonl", "eval.jsonl", "sft.jsonl")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_command_is_understood_and_reads_what_an_earlier_one_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    repository = make_repository(tmp_path, f"{recipe}.sh")
    done = run_script(repository, f"{recipe}.sh", "3", "4")
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(repository)
    got, made, *stages, report = recorded_calls(repository)
    model, task = Path(got[2]), Path(made[2])
    assert got[:2] == ["python", "scripts/smollm2.py"] and made[1] in {
        "scripts/instruction_task.py",
        "scripts/word_problem_task.py",
        "scripts/style_task.py",
    }
    assert report == ["python", "scripts/recipe_report.py", recipe, str(model.parent)]
    written = {model, *(task / name for name in FILES), *model.parent.glob("*prompts.jsonl")}
    for _, job, *arguments in stages:
        config = check_job(job, arguments)
        assert inputs(config) <= written, f"{job} {arguments}"
        written.add(Path(config.output.output) if job == "generate" else Path(config.run.run_dir, "checkpoints/step-7"))
    assert [job for _, job, *_ in stages] == JOBS[recipe]
    assert [re.search(r"--seed\t(\d)", "\t".join(call))[1] for call in stages if "--seed" in call] == [
        *["3"] * (1 + (recipe == "reward_model")),
        *["4"] * (1 + (recipe == "reward_model")),
    ]


@pytest.mark.parametrize(("job", "jobs"), [("dpo", ["generate"]), ("rl", ["generate"] * 2), ("tools", ["rl"] * 2)])
def test_the_commands_that_score_what_trl_has_trained_are_understood(tmp_path, monkeypatch, job, jobs):
    monkeypatch.syspath_prepend(str(Path(recipe_report.__file__).parent / "bench"))
    import trl_recipes

    calls: list[list[str]] = []
    monkeypatch.setattr(trl_recipes, "ensure_trl", lambda directory: Path("python"))
    monkeypatch.setattr(trl_recipes.subprocess, "run", lambda command, check: calls.append(command))
    monkeypatch.setattr("sys.argv", ["trl_recipes.py", job, str(tmp_path), "0"])
    trl_recipes.main()
    scored = [call[1:] for call in calls if call[0] == str(trl_recipes.COATI_RL)]
    assert [name for name, *_ in scored] == jobs
    for name, *arguments in scored:
        check_job(name, arguments)


@pytest.mark.parametrize(
    ("script", "argument", "message"),
    [
        ("sft_dpo.sh", "--help", "'--help' is no seed: give whole numbers"),
        ("tool_use.sh", "1.5", "'1.5' is no seed: give whole numbers"),
        ("pipeline_example.sh", "--max-steps", "'--max-steps': this script takes no arguments"),
        ("textarena_example.sh", "3", "'3': this script takes no arguments"),
    ],
)
def test_an_argument_that_a_script_would_ignore_is_refused_before_its_first_stage(
    tmp_path: Path, script: str, argument: str, message: str
) -> None:
    done = run_script(make_repository(tmp_path, script), script, argument)
    assert (done.returncode, (tmp_path / "calls").exists()) == (2, False)
    assert message in done.stderr


def test_no_name_thing_or_telling_of_a_held_out_problem_is_trained() -> None:
    data = word_problem_task.make_data(0, num_sft=600, num_train=600, num_eval=200)
    held_out, trained = ([row["messages"]["content"] for row in data[name]] for name in ("eval", "train"))
    trained += [row["messages"][1]["content"] for row in data["sft"]]

    def parts(texts: list[str], of: tuple[str, ...]) -> set[str]:
        return {word for text in texts for word in re.findall(r"\w+", text) if word in of}

    for vocabulary in (word_problem_task.NAMES, word_problem_task.THINGS):
        assert parts(held_out, vocabulary) and parts(held_out, vocabulary).isdisjoint(parts(trained, vocabulary))
    words = (*word_problem_task.NAMES, *word_problem_task.THINGS)

    def telling(text: str) -> str:
        return re.sub(r"\d+", "#", re.sub("|".join(words), "_", text))

    tellings = {telling(text) for text in held_out}
    assert len(tellings) == len(word_problem_task.KINDS) and tellings.isdisjoint(map(telling, trained))


def test_a_problem_has_the_whole_number_that_its_expression_gives() -> None:
    rng = random.Random(0)
    vocabulary, _ = word_problem_task.split_vocabulary(rng)
    for _ in range(300):
        problem = word_problem_task.make_problem(rng, vocabulary)
        assert int(problem.answer) == eval(problem.expression) > 0
        numbers = re.findall(r"\d+", problem.expression)
        assert sorted(numbers) == sorted(re.findall(r"\d+", problem.question))


def test_few_conversations_call_the_calculator_and_all_end_with_the_right_number() -> None:
    rows = word_problem_task.make_data(0, num_sft=2000, num_train=1, num_eval=1)["sft"]
    with_calls = [row["messages"] for row in rows if len(row["messages"]) == 5]
    for messages in with_calls:
        (call,) = messages[2]["tool_calls"]
        result = calculate(call["function"]["arguments"]["expression"])
        assert messages[3]["content"] == result and messages[4]["content"] == f"The answer is \\boxed{{{result}}}."
    offered = [row for row in rows if row["tools"]]
    assert 0.26 < len(with_calls) / len(offered) < 0.33  # 0.25 / 0.85, give or take three standard errors
    assert {len(row["messages"]) for row in rows} == {3, 5} and len(offered) < len(rows)


@pytest.mark.parametrize(
    ("answer", "missed"),
    [
        ("Stones are hard and old.", ""),
        ("A stone is hard and old.", ""),
        ("The old stones, they say, are hard.", "missed: no commas"),
        ("What I like are the stones.", "missed: begins with its subject"),
        ("Stones are hard", "missed: short"),
        ("Stones " + "and " * 14 + "rain, then", "missed: short, no commas"),
        ("Stones " + "and " * 14, ""),
        ("Milestones are hard and old.", "missed: begins with its subject"),
    ],
)
def test_the_judge_wants_a_short_sentence_without_commas_that_begins_with_its_subject(answer: str, missed: str) -> None:
    found = style_task.score(answer, "stones")
    wishes = [wish for wish in missed.removeprefix("missed: ").split(", ") if wish]
    assert found["detail"] == (f"missed: {', '.join(wishes)}" if wishes else "")
    assert found["answer_correct"] == (not wishes) and found["reward"] == pytest.approx(1 - len(wishes) / 3)


def test_no_subject_is_asked_for_in_training_and_in_the_evaluation() -> None:
    train, held_out = style_task.make_rows(0)
    asked = [{row["gt_answer"] for row in rows} for rows in (train, held_out)]
    assert len(train) == 4 * len(asked[0]) and len(held_out) == 4 * len(asked[1]) and asked[0].isdisjoint(asked[1])
    assert all(row["gt_answer"] in row["messages"]["content"] for row in train + held_out)
    assert len({row["messages"]["content"] for row in train + held_out}) == len(train) + len(held_out)


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of two seeds of SFT and DPO, one of them also with TRL."""
    for name, num_right in (("start", 1), ("sft", 3), ("dpo-0", 5), ("dpo-1", 7), ("trl-dpo-0", 6)):
        answers = [{"answer_correct": index < num_right} for index in range(10)]
        write_rows(tmp_path / f"eval-{name}.jsonl", answers)
    for seed in (0, 1):
        rows = [{"rewards/accuracies": 0.5}, {"rewards/accuracies": 0.75 + seed / 8}]
        write_rows(tmp_path / f"dpo-{seed}" / "eval" / "summary.jsonl", rows)
        write_rows(tmp_path / f"dpo-{seed}" / "metrics.jsonl", [{"step": 1, "loss": 0.7}, {"step": 2, "loss": 0.5}])
    log = [{"step": 1, "loss": 0.69}, {"step": 2, "train_runtime": 3}]
    write_rows(tmp_path / "trl-dpo-0" / "trl.json", [{"seconds": 3, "log": log}])
    write_rows(tmp_path / "stages" / "sft.json", [{"seconds": 90}])
    return tmp_path


def test_figures_are_read_from_the_files_of_all_seeds(root: Path) -> None:
    recipe = RECIPES["sft_dpo"]
    assert {name: read(root) for name, read in {**recipe.accuracies, **recipe.others}.items()} == {
        "as it comes": [0.1],
        "SFT": [0.3],
        "SFT, DPO": [0.5, 0.7],
        "SFT, DPO of TRL": [0.6],
        "held-out pairs in order": [0.75, 0.875],
    }
    assert {name: read(root) for name, read in recipe.curves.items()} == {
        "Coati-RL": [[(1, 0.7), (2, 0.5)]] * 2,
        "TRL": [[(1, 0.69)]],
    }


@pytest.mark.full
def test_the_report_is_printed_and_drawn(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["recipe_report.py", "sft_dpo", str(root)])
    assert recipe_report.main() == 0
    assert capsys.readouterr().out.splitlines() == [
        "as it comes: 10.0%",
        "SFT: 30.0%",
        "SFT, DPO: 50.0%, 70.0%",
        "SFT, DPO of TRL: 60.0%",
        "held-out pairs in order: 75.0%, 87.5%",
        "sft: 90 s",
        "all stages: 1.5 min",
        str(root / "sft_dpo.png"),
    ]
    assert (root / "sft_dpo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_a_recipe_without_results_of_trl_is_drawn_as_well(root: Path) -> None:
    (root / "trl-dpo-0" / "trl.json").unlink()  # as while it trains
    draw(RECIPES["sft_dpo"], {"SFT": [0.3]}, root, root / "picture.png")
    assert (root / "picture.png").exists()


def test_a_gain_that_is_too_small_is_named_with_its_figures() -> None:
    accuracies = {"before": [0.25], "after": [0.25, 0.3125]}
    (found,) = shortfalls(accuracies, [Claim(better="after", worse="before", gain=0.1)])
    assert found == "'after' has 28.1% and 'before' 25.0%: less than 10 points"
    assert not list(shortfalls(accuracies, [Claim(better="after", worse="before", gain=0.03)]))


def test_a_name_of_two_lines_is_one_in_the_table() -> None:
    assert next(table({"the same\nwithout": [0.5]}, {})) == "the same without: 50.0%"


def test_what_an_interrupted_start_of_tinkers_recipes_left_is_made_again_once(tmp_path: Path) -> None:
    repository = make_repository(tmp_path, "tinker_recipes.sh")
    out, server = tmp_path / "out", tmp_path / "server"
    for left in ("client", "tiny"):
        (out / left).mkdir(parents=True)
    (out / "client" / "done").touch()
    (out / "languages.jsonl").touch()  # written before the model that the server needs
    server.write_text("#!/bin/sh\necho http://127.0.0.1:1\nexec sleep 60\n")
    server.chmod(0o755)

    def start() -> tuple[int, str]:
        command = ["env", "RECIPES=none", repository / "scripts" / "tinker_recipes.sh", out, server]
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=30, check=False)
        return done.returncode, done.stdout

    (repository / "fail").write_text("tinker_recipe_data")
    assert start() == (1, "the reason\n")
    (repository / "fail").unlink()
    assert start() == (0, "")
    assert start() == (0, "")
    made = [Path(call[1]).name for call in recorded_calls(repository)]
    assert made == ["make_tiny_model.py", "tinker_recipe_data.py", "tinker_recipe_data.py"]
