"""The list of work: the same items in the same order for every rank, and nothing kept for longer."""

from coati_rl.work import FinishWork, SaveWork, WorkList


def test_every_rank_of_a_dp_group_gets_the_groups_share():
    todo = WorkList(num_ranks=4, ranks_per_dp_group=2)
    assert todo.ask(0, 0) is None
    todo.add(0, ["share of group 0", "share of group 1"])
    assert [todo.ask(0, rank) for rank in range(4)] == ["share of group 0"] * 2 + ["share of group 1"] * 2


def test_a_rank_that_asks_twice_gets_the_same_item():
    todo = WorkList(num_ranks=1, ranks_per_dp_group=1)
    todo.add(0, [SaveWork(step=1, data_state={})])
    assert todo.ask(0, 0) is todo.ask(0, 0)


def test_an_item_is_kept_until_the_slowest_rank_has_asked_for_the_next():
    todo = WorkList(num_ranks=2, ranks_per_dp_group=1)
    for number in range(3):
        todo.add(number, [FinishWork(step=number)] * 2)
    todo.ask(2, 0)
    assert todo.ask(0, 1) == FinishWork(step=0)
    todo.ask(1, 1)
    assert sorted(todo._items) == [1, 2]
