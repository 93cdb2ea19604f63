"""Score responses with the verifiers of generators: in this process, in workers, and on the command line."""

import json

import pytest

from coati_rl.generator_spec import GENERATED, parse_generator
from coati_rl.reading.generators import load_package, open_generator
from coati_rl.reward_spec import RewardSpec
from coati_rl.types import Problem
from rewards.__main__ import main
from rewards.generated_reward import GeneratedReward
from rewards.registry import SYSTEM_PROMPTS, columns_of, default_system_prompt, needs_ground_truth
from rewards.workers.pool import RewardPool


def row_of(name, position=0):
    return open_generator(parse_generator(f"reasoning_gym:{name}"), seed=None, where="").row(position)


def problem_of(row):
    columns = json.loads(json.dumps(row))
    return Problem(ground_truth=row["gt_answer"] or "", columns=columns)


def scores_of(name, *responses, correct_from=1.0):
    return [*GeneratedReward(correct_from=correct_from).score(responses, problem_of(row_of(name)))]


def test_the_verifier_s_score_of_the_last_answer_is_the_reward():
    truth = row_of("chain_sum")["gt_answer"]
    right, last, part, wrong = scores_of(
        "chain_sum",
        f"so it is <answer> {truth}\n</answer>",
        f"<answer>no</answer> but <answer>{truth}</answer>",
        f"<answer>it is {truth}</answer>",
        "<answer>no</answer>",
    )
    assert [(each.reward, each.verdict, each.answer_correct) for each in (right, last)] == [(1.0, "ok", True)] * 2
    assert part.reward == pytest.approx(len(truth) / len(f"it is {truth}")) and not part.answer_correct
    assert (wrong.reward, wrong.verdict, wrong.format_valid) == (0.0, "wrong", True)


def test_a_response_without_tags_is_wrong_and_not_valid():
    truth = row_of("chain_sum")["gt_answer"]
    (score,) = scores_of("chain_sum", truth)
    assert (score.reward, score.verdict, score.format_valid) == (0.0, "wrong", False)


def test_correct_from_decides_what_counts_as_correct():
    truth = row_of("chain_sum")["gt_answer"]
    (score,) = scores_of("chain_sum", f"<answer>={truth}</answer>", correct_from=0.1)
    assert 0.1 < score.reward < 1 and score.answer_correct and score.verdict == "ok"


def test_a_verifier_that_raises_makes_the_response_invalid():
    (score,) = scores_of("prime_factorization", "<answer>two</answer>")
    assert score.verdict == "invalid" and score.detail.startswith("the verifier failed: ValueError: invalid literal")
    (score,) = GeneratedReward().score(["<answer>1</answer>"], Problem(ground_truth="1", columns={"metadata": {}}))
    assert score.verdict == "invalid" and "names no generator of reasoning_gym as source_dataset" in score.detail


def test_the_system_prompt_is_the_package_s_and_rows_need_their_metadata():
    load_package()
    from reasoning_gym.utils import SYSTEM_PROMPTS as OF_PACKAGE

    assert default_system_prompt(GENERATED) == SYSTEM_PROMPTS[GENERATED] == OF_PACKAGE["default"]
    assert columns_of(f"{GENERATED}=1,boxed=0").required == ("metadata",) and columns_of(GENERATED).are_kept
    assert columns_of("boxed").required == () and not needs_ground_truth(GENERATED)


@pytest.mark.full
def test_workers_score_and_end_a_verifier_that_does_not_return():
    heavy, game = row_of("spell_backward"), row_of("puzzle24")
    with RewardPool(RewardSpec(reward_type=GENERATED), num_workers=1, timeout_s=1.0) as pool:
        future = pool.submit([f"<answer>{heavy['gt_answer']}</answer>"], problem_of(heavy))
        hanging = pool.submit(
            ["<answer>9**9**9**9</answer>", f"<answer>{game['gt_answer']}</answer>"], problem_of(game)
        )
        assert [score.verdict for score in future.result(60)] == ["ok"]
        assert [score.verdict for score in hanging.result(60)] == ["invalid", "ok"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["arc_agi", "group_anagrams", "figlet_font", "letter_jumble", "rush_hour"])
def test_the_data_that_generators_load_fits_in_a_worker(name):
    row = row_of(name)
    with RewardPool(RewardSpec(reward_type=GENERATED), num_workers=1, timeout_s=5.0) as pool:
        (score,) = pool.submit([f"<answer>{row['gt_answer']}</answer>"], problem_of(row)).result(60)
    assert score.verdict != "invalid"


@pytest.mark.full
def test_the_command_scores_rows_that_carry_their_metadata(monkeypatch, capsys, tmp_path):
    row = row_of("countdown")
    lines = [{**row, "response": f"<answer>{text}</answer>"} for text in (row["gt_answer"], "1")]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with path.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert main(["score", "--type", GENERATED]) in (0, None)
    scores = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [score["reward"] for score in scores] == [1.0, 0.05]
    path.write_text(json.dumps({"response": "1", "gt_answer": "1"}) + "\n")
    with path.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert main(["score", "--type", GENERATED]) == 2
    assert 'line 1 has no "metadata"' in capsys.readouterr().err
