"""Test which prompt has which number, and which comes next."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction

from coati_rl.coordinator.prompt_queue import PromptQueue
from coati_rl.reading.draw_order import DrawOrder
from coati_rl.reading.prompt_source import DatasetPrompts, probe_tokens
from coati_rl.types import Prompt


def uids(source):
    queue, drawn = PromptQueue(source), []
    while (prompt := queue.draw()) is not None:
        drawn.append(prompt.uid)
    return drawn


def test_every_episode_draws_every_prompt_once_under_a_uid_of_its_own(make_prompts):
    drawn = uids(DatasetPrompts(make_prompts(5), num_episodes=3, seed=0))
    for episode in range(3):
        assert sorted(drawn[5 * episode : 5 * episode + 5]) == [f"train-{i}.{episode}" for i in range(5)]


def test_the_order_is_the_seeds_and_changes_with_every_episode(make_prompts):
    first, again, other = (uids(DatasetPrompts(make_prompts(20), num_episodes=2, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert [uid.split(".")[0] for uid in first[:20]] != [uid.split(".")[0] for uid in first[20:]]


def test_the_order_is_that_of_earlier_versions_whose_checkpoints_go_on(make_prompts):
    drawn = uids(DatasetPrompts(make_prompts(5), num_episodes=2, seed=3))
    assert drawn[:5] == ["train-1.0", "train-0.0", "train-2.0", "train-3.0", "train-4.0"]
    assert drawn[5:] == ["train-1.1", "train-2.1", "train-0.1", "train-3.1", "train-4.1"]


def test_a_prompt_has_its_number_in_whatever_order_numbers_are_asked_for(make_prompts):
    source = DatasetPrompts(make_prompts(5), num_episodes=3, seed=1)
    in_order = [source.draw(number) for number in range(15)]
    assert [source.draw(number) for number in reversed(range(15))] == in_order[::-1]
    assert DatasetPrompts(make_prompts(5), num_episodes=3, seed=1).draw(13) == in_order[13]


def test_what_a_run_of_more_episodes_has_drawn_is_drawn_again(make_prompts):
    drawn = uids(DatasetPrompts(make_prompts(5), num_episodes=2, seed=3))
    queue = PromptQueue(DatasetPrompts(make_prompts(5), num_episodes=1, seed=3))
    queue.resume(10, {drawn[8]})
    assert queue.draw().uid == drawn[8] and not queue.has_more


def test_a_queue_knows_how_much_there_is(make_prompts):
    queue = PromptQueue(DatasetPrompts(make_prompts(2), num_episodes=2, seed=0))
    assert (queue.length, queue.num_drawn, queue.has_more) == (4, 0, True)
    for _ in range(4):
        queue.draw()
    assert (queue.num_drawn, queue.has_more, queue.draw()) == (4, False, None)


def test_a_resumed_queue_first_draws_again_what_waits_in_the_old_order_and_then_goes_on(make_prompts):
    source = DatasetPrompts(make_prompts(5), num_episodes=2, seed=3)
    whole, queue = uids(source), PromptQueue(source)
    queue.resume(7, {whole[6], whole[2]})
    assert [prompt.uid for prompt in queue.waiting] == [whole[2], whole[6]]
    assert [queue.draw().uid for _ in range(5)] == [whole[2], whole[6], *whole[7:]]


def test_what_waits_is_drawn_again_even_when_the_dataset_is_used_up(make_prompts):
    queue = PromptQueue(DatasetPrompts(make_prompts(2), num_episodes=1, seed=0))
    queue.resume(2, ["train-1.0"])
    assert (queue.num_drawn, queue.has_more) == (2, True)
    assert queue.draw().uid == "train-1.0"
    assert not queue.has_more


class Squares:
    """An endless source: prompt i asks for the square of i."""

    order = DrawOrder(seed=0, num_prompts=None, fingerprint="squares", ground_truths="")
    length = None

    def draw(self, number):
        return Prompt(uid=f"square-{number}", token_ids=(number,), ground_truth=str(number**2))


def test_an_endless_source_has_always_more_and_is_resumed_by_number():
    queue = PromptQueue(Squares())
    queue.resume(1000, {"square-7"})
    assert [queue.draw().uid for _ in range(3)] == ["square-7", "square-1000", "square-1001"]
    assert queue.has_more and queue.length is None


def test_the_draw_order_is_known_by_seed_and_prompts(make_prompts):
    orders = [DatasetPrompts(make_prompts(n), num_episodes=1, seed=seed).order for n, seed in ((3, 0), (3, 0), (4, 0))]
    assert orders[0] == orders[1] != orders[2]
    assert (orders[0].seed, orders[0].num_prompts) == (0, 3)


def mixed(make_prompts, seed=0, shares=(Fraction(1, 4), Fraction(3, 4))):
    prompts = [*make_prompts(2), *(replace(prompt, uid=f"code:1-{i}") for i, prompt in enumerate(make_prompts(3)))]
    return DatasetPrompts(prompts, num_episodes=4, seed=seed, shares=shares)


def test_sources_with_shares_are_mixed_and_passed_over_one_by_one(make_prompts):
    drawn = uids(mixed(make_prompts))
    assert len(set(drawn)) == len(drawn) == 20, "of 5 prompts, 4 episodes"
    assert Counter(uid.partition("-")[0] for uid in drawn) == {"train": 5, "code:1": 15}
    assert Counter(uid.partition(".")[2] for uid in drawn if uid.startswith("train")) == {"0": 2, "1": 2, "2": 1}
    assert sorted(uid for uid in drawn if uid.endswith(".4")) == [f"code:1-{i}.4" for i in range(3)]


def test_mixed_sources_are_resumed_by_number_and_by_the_same_shares(make_prompts):
    whole, source = uids(mixed(make_prompts)), mixed(make_prompts)
    assert [source.draw(number).uid for number in (13, 2, 19)] == [whole[13], whole[2], whole[19]]
    others = [mixed(make_prompts, shares=(Fraction(1, 2), Fraction(1, 2))), mixed(make_prompts, shares=())]
    assert len({each.order.fingerprint for each in (source, *others)}) == 3
    assert mixed(make_prompts, seed=1).order.fingerprint == source.order.fingerprint


def test_a_probe_is_the_first_prompts_tokens(make_prompts):
    assert probe_tokens(make_prompts(3), 4) == (1, 2, 3, 1)
    assert probe_tokens(make_prompts(1), 4) == (1, 2, 3)
