"""Which prompt comes next."""

from coati_rl.data.cursor import PromptCursor


def uids(cursor):
    drawn = []
    while (prompt := cursor.draw()) is not None:
        drawn.append(prompt.uid)
    return drawn


def test_every_episode_draws_every_prompt_once_under_a_uid_of_its_own(make_prompts):
    drawn = uids(PromptCursor(make_prompts(5), num_episodes=3, seed=0))
    for episode in range(3):
        assert sorted(drawn[5 * episode : 5 * episode + 5]) == [f"train-{i}.{episode}" for i in range(5)]


def test_the_order_is_the_seeds_and_changes_with_every_episode(make_prompts):
    first, again, other = (uids(PromptCursor(make_prompts(20), num_episodes=2, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert [uid.split(".")[0] for uid in first[:20]] != [uid.split(".")[0] for uid in first[20:]]


def test_the_cursor_knows_how_much_there_is(make_prompts):
    cursor = PromptCursor(make_prompts(2), num_episodes=2, seed=0)
    assert (cursor.num_due, cursor.num_drawn, cursor.has_more) == (4, 0, True)
    uids(cursor)
    assert (cursor.num_drawn, cursor.has_more, cursor.draw()) == (4, False, None)


def test_a_resumed_cursor_first_draws_again_what_waits_in_the_old_order_and_then_goes_on(make_prompts):
    whole = uids(PromptCursor(make_prompts(5), num_episodes=2, seed=3))
    cursor = PromptCursor(make_prompts(5), num_episodes=2, seed=3)
    cursor.resume(7, {whole[6], whole[2]})
    assert [prompt.uid for prompt in cursor.waiting] == [whole[2], whole[6]]
    assert uids(cursor) == [whole[2], whole[6], *whole[7:]]


def test_what_waits_is_drawn_again_even_when_the_dataset_is_used_up(make_prompts):
    cursor = PromptCursor(make_prompts(2), num_episodes=1, seed=0)
    cursor.resume(2, ["train-1.0"])
    assert (cursor.num_drawn, cursor.has_more) == (2, True)
    assert uids(cursor) == ["train-1.0"]
    assert not cursor.has_more


def test_the_draw_order_is_known_by_seed_and_prompts(make_prompts):
    orders = [PromptCursor(make_prompts(n), num_episodes=1, seed=seed).order for n, seed in ((3, 0), (3, 0), (4, 0))]
    assert orders[0] == orders[1] != orders[2]
    assert (orders[0].seed, orders[0].num_prompts) == (0, 3)
