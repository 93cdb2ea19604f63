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
