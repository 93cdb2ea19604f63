"""Test that a run's rollouts are read with the rewards of their tokens, and made samples with the returns of these."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coati_rl.batching.recorded_rollouts import read_rollouts
from coati_rl.batching.turn_rewards import token_rewards
from coati_rl.batching.value_samples import token_returns, value_samples
from coati_rl.errors import ConfigError
from coati_rl.observability.rollouts import RolloutRecorder
from coati_rl.reading.files import read_rows
from coati_rl.reading.forms import Recorded
from coati_rl.reading.row_formats import Columns, FormSet
from coati_rl.types import Score, TokenReward
from tests.unit.batching.test_turn_rewards import one_turn, rewarded
from tests.unit.batching.trajectories import trajectory

SPARSE = [0.0, 0.5, 0.0, 1.0]  # rewards of four tokens in the loss: at the end of a turn, and at the end


def decided(*rewards: float) -> tuple[Score, ...]:
    return tuple(Score(reward=each, answer_correct=True, format_valid=True, verdict="ok") for each in rewards)


@pytest.fixture
def read_back(tmp_path: Any) -> Any:
    """A group -> what is read of its lines."""

    def write_and_read(group: Any, detail: Any = "full") -> FormSet:
        RolloutRecorder(tmp_path, detail).write(1, [group], advantages={})
        return read_rollouts(read_rows(str(tmp_path), flag="--dataset"), "value")

    return write_and_read


def recorded(rewards: list[float], *, prompt: int = 2, holes: int = 0, **changes: Any) -> Recorded:
    """A prompt, then a token of each reward, with tokens of a tool after the first one."""
    mask = np.array([True, *[False] * holes, *[True] * (len(rewards) - 1)])
    fields = {
        "prompt_ids": np.arange(prompt, dtype=np.int32),
        "token_ids": np.arange(50, 50 + len(mask), dtype=np.int32),
        "loss_mask": mask,
        "rewards": np.array(rewards, dtype=np.float32),
        "last_turn": slice(0, 1),
        "response": "",
        "where": "--dataset r, line 1",
    }
    return Recorded(**(fields | changes))


@pytest.mark.parametrize(
    "trajectories",
    [
        (rewarded((4, 0.25), (8, -1.0)), one_turn(episode=1)),
        (
            rewarded((2, 0.25), (6, 0.5), (11, 2.0)),
            one_turn(episode=1),
        ),  # before the first answer, between two, at the end
        None,  # an episode with a fork that a limit cut, and one answer
    ],
)
def test_rewards_and_loss_tokens_are_those_that_a_run_with_a_critic_trains_on(
    forked_group: Any, read_back: Any, trajectories: Any
) -> None:
    group = replace(forked_group(trajectories) if trajectories else forked_group(), scores=decided(1.25, -0.5))
    found, expected = read_back(group).forms, token_rewards(group, np.array([1.25, -0.5]))
    assert [form.rewards.tolist() for form in found] == [each.tolist() for each in expected]
    for form, each in zip(found, group.trajectories, strict=True):
        ids = np.append(form.prompt_ids, form.token_ids)
        mask = np.append(np.zeros(len(form.prompt_ids), dtype=bool), form.loss_mask)
        assert ids.tolist() == each.token_ids.tolist() and mask.tolist() == each.loss_mask.tolist()


def test_lines_share_their_prompt_and_those_without_a_decided_reward_are_counted(
    forked_group: Any, read_back: Any
) -> None:
    scores = (*decided(1.0), replace(decided(0.0)[0], verdict="invalid", reward=math.nan))
    made = read_back(replace(forked_group(), scores=scores))
    assert (len(made.forms), made.num_undecided) == (2, 1)
    both = read_back(replace(forked_group((one_turn(episode=0), one_turn(episode=1))), scores=decided(1.0, 0.0)))
    assert both.forms[-1].prompt_ids is both.forms[-2].prompt_ids


@pytest.mark.parametrize("discount", [1.0, 0.5])
@pytest.mark.parametrize("rewards", [SPARSE, [2.0], [0.0, 0.0, -1.0]])
def test_a_return_is_the_discounted_sum_of_later_rewards(rewards: list[float], discount: float) -> None:
    powers = np.arange(len(rewards))
    expected = [float((discount ** powers[: len(rewards) - t] * rewards[t:]).sum()) for t in powers]
    assert token_returns(np.array(rewards, dtype=np.float32), discount=discount).tolist() == pytest.approx(expected)


def test_tokens_between_turns_are_no_steps_and_what_is_cut_off_still_counts(tokenizer: Any) -> None:
    forms = [recorded(SPARSE, holes=3), recorded([1.0])]
    whole = value_samples(forms, tokenizer, max_length=99, discount=0.5)
    assert [each.arrays["returns"].tolist() for each in whole.samples] == [[0.375, 0.75, 0.5, 1.0], [1.0]]
    assert [len(each) for each in whole.samples] == [9, 3]
    assert (whole.rows, whole.num_cut, whole.num_left_out) == ((0, 1), 0, 0)
    cut = value_samples(forms, tokenizer, max_length=7, discount=0.5)
    assert [each.arrays["returns"].tolist() for each in cut.samples] == [[0.375, 0.75], [1.0]]
    assert cut.num_cut == 1
    first = value_samples(forms, tokenizer, max_length=5, discount=0.5).samples[0]
    assert (first.arrays["returns"].tolist(), len(first), first.num_loss_tokens) == ([0.375], 5, 1)
    none = value_samples(forms, tokenizer, max_length=2, discount=0.5)
    assert (none.samples, none.num_left_out) == ((), 2)


def line(**changes: Any) -> dict[str, Any]:
    whole = {
        "step": 1, "uid": "train-0.0", "sample": 0, "episode": 0, "response": "a", "reward": 1.0, "verdict": "ok",
        "prompt_token_ids": [1, 2], "token_ids": [5, 6], "turns": [[0, 2, "stop"]],
    }  # fmt: skip
    return {key: value for key, value in (whole | changes).items() if value is not None}


def refusal(*rows: Any, **columns: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read_rollouts([(f"-d r, line {n}", row) for n, row in enumerate(rows, 1)], "value", Columns(**columns))
    return str(caught.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([line(), line(uid="b", token_ids=None)], "-d r, line 2: has no token_ids, and values are of the tokens that"),
        ([{"messages": []}], "-d r, line 1: has no step, uid, episode, sample, response, reward, verdict, and is no"),
        (["text"], "-d r, line 1: has no step, uid, "),
        ([line(token_ids=[5, 6.5])], "-d r, line 1: is no line of rollouts as a run writes it (token_ids are no list"),
        ([line(token_ids=[5, -1])], "-d r, line 1: is no line of rollouts as a run writes it (token_ids are no list"),
        ([line(loss_mask=[[True, 3]])], "-d r, line 1: is no line of rollouts as a run writes it (2 token_ids, a"),
        ([line(turns=[[0, 3, "stop"]])], "-d r, line 1: is no line of rollouts as a run writes it (2 token_ids, a"),
        ([line(turns=[])], "-d r, line 1: is no line of rollouts as a run writes it ("),
        ([line(token_rewards=[[0, "env"]])], "-d r, line 1: is no line of rollouts as a run writes it ("),
        ([line(sample=1, parent_sample=0)], "-d r, line 1: trajectories of episode 0 of train-0.0 are missing, and"),
        ([line(messages=[])], "-d r, line 1: trajectories of episode 0 of train-0.0 are missing"),
        ([line(), line(sample=2)], "-d r, line 1: trajectories of episode 0 of train-0.0 are missing"),
        ([line(sample="a")], "-d r, line 1: has no number as sample, and is no line of rollouts; give RUN/rollouts,"),
    ],
)  # fmt: skip
def test_what_has_no_sampled_tokens_or_only_a_part_of_an_episode_is_refused(rows: list[Any], message: str) -> None:
    assert refusal(*rows).startswith(message)


def test_columns_and_templates_are_refused() -> None:
    assert refusal(line(), prompt="question").startswith("--prompt-key and --input-template have no effect on coati-rl")
    assert refusal(line(), input_template="{}").startswith("--prompt-key and --input-template")


def test_rollouts_as_text_are_refused(forked_group: Any, read_back: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"line 1: has no prompt_token_ids, token_ids, turns, .*--rollout-detail full"
    ):
        read_back(forked_group(), "text")


def test_rows_of_another_tokenizer_are_refused_unless_few_texts_differ(tokenizer: Any) -> None:
    def answer(text: str, response: str) -> Recorded:
        ids = np.array(tokenizer(text)["input_ids"], dtype=np.int32)
        mask = np.ones(len(ids), dtype=bool)
        own = {"token_ids": ids, "loss_mask": mask, "last_turn": slice(0, len(ids)), "response": response}
        return recorded([0.0] * len(ids), **own)

    same, stripped, other = answer("is 4", "is 4"), answer("yes ", "yes"), answer("??", "is 4")
    made = value_samples([same, stripped, other], tokenizer, max_length=99, discount=1.0)
    assert len(made.samples) == 3
    with pytest.raises(ConfigError, match="line 1: in the tokenizer of --model its token_ids are other text than its"):
        value_samples([same, other, other], tokenizer, max_length=99, discount=1.0)


def test_an_answer_of_one_token_has_both_rewards_and_one_of_none_has_none(read_back: Any, forked_group: Any) -> None:
    tool = TokenReward(position=3, name="tool", value=0.5)
    group = forked_group((trajectory([1, 2, 3, 10], (3, 4), rewards=(tool,)), trajectory([1, 2, 3], (3, 3), episode=1)))
    found = read_back(replace(group, scores=decided(1.5, 0.0))).forms
    assert [form.rewards.tolist() for form in found] == [[1.5], []]
