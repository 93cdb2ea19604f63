"""Test the search for the smallest change that fits."""

from coati_rl.memory.nearest import Change, largest_that_fits, nearest_changes

A, B, C = (Change(flags=f"--{name} {size}", values={name: size}) for name, size in (("a", 1), ("b", 2), ("c", 4)))


def search(need, *, budgets=()):
    """Names of the changes found where each saves its size; a budget saves 3 beside any change that is listed."""

    def saved(change):
        return 0 if change is None else sum(change.values.values())

    def budget(change):
        is_listed = (change.flags if change else None) in budgets
        return Change(flags="--budget 3", values={"budget": 3}) if is_listed and saved(change) + 3 >= need else None

    return [each.flags for each in nearest_changes([A, B, C], lambda each: saved(each) >= need, budget=budget)]


def test_each_change_that_fits_by_itself_is_named_with_a_smaller_budget_first():
    assert search(2, budgets=[None]) == ["--budget 3", "--b 2", "--c 4"]


def test_where_none_fits_by_itself_the_first_with_a_smaller_budget_is_named():
    assert search(5, budgets=["--a 1", "--b 2", "--c 4"]) == ["--b 2 --budget 3"]


def test_at_last_changes_are_joined_and_nothing_is_named_where_all_do_not_suffice():
    assert search(6) == ["--a 1 --b 2 --c 4"]
    assert search(8) == []


def test_the_largest_size_that_fits_is_found_to_within_a_tenth_and_rounded_down():
    found = largest_that_fits(100, 16384, lambda size: size <= 5000)
    assert 4500 <= found <= 5000 and found % 100 == 0
    assert largest_that_fits(100, 16384, lambda size: size <= 105) == 100
    assert largest_that_fits(100, 16384, lambda size: False) is None
    assert largest_that_fits(100, 100, lambda size: True) is None
