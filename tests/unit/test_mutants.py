"""Test that the lists of mutants fit the tree: each bug has one place, compiles, and names existing tests."""

import re
from pathlib import Path

import pytest
from mutants.run import LISTS, OF_GPUS, ROOT, Mutant, judge, load_mutants


@pytest.fixture(scope="module")
def mutants() -> list[Mutant]:
    return [*load_mutants(LISTS), *load_mutants(OF_GPUS)]


def test_there_are_at_least_60_mutants_and_no_two_have_one_name(mutants: list[Mutant]) -> None:
    assert len(mutants) >= 60
    assert len({mutant.name for mutant in mutants}) == len(mutants)


def test_each_mutant_has_one_place_and_makes_other_code_of_it(mutants: list[Mutant]) -> None:
    for mutant in mutants:
        text = (ROOT / mutant.file).read_text("utf-8")
        mutated = mutant.apply(text)
        assert mutated != text, mutant.name
        if mutant.file.endswith(".py"):
            compile(mutated, mutant.file, "exec")  # an error of syntax would fail any test


def test_the_killing_tests_are_there(mutants: list[Mutant]) -> None:
    for mutant in mutants:
        assert mutant.killed_by, mutant.name
        for node_id in mutant.killed_by:
            file, _, function = node_id.partition("::")
            text = (ROOT / file).read_text("utf-8")
            assert f"def {function.partition('[')[0]}(" in text, f"{mutant.name}: {node_id}"


def test_the_fast_suite_has_a_killing_test_of_each_mutant_whole(mutants: list[Mutant]) -> None:
    left_out = re.compile(r"@pytest\.mark\.(full|sampled).*\n(?:@.*\n|[ )].*\n)*(?:async )?def (test_\w+)\(")
    of_file: dict[str, set[str]] = {}
    for mutant in mutants:
        kept = []
        for node_id in mutant.killed_by:
            file, _, test = node_id.partition("[")[0].partition("::")
            if file not in of_file:
                of_file[file] = {found[2] for found in left_out.finditer((ROOT / file).read_text("utf-8"))}
            kept += [node_id] if test not in of_file[file] else []
        assert kept or mutant.full, f"{mutant.name}: `full: true`, or a test that the fast suite runs"


def test_an_old_text_that_is_not_there_exactly_once_is_refused() -> None:
    mutant = Mutant(name="x", file="f.py", old="a", new="b", killed_by=("t",))
    assert mutant.apply("cad") == "cbd"
    for text in ("", "aa"):
        with pytest.raises(ValueError, match=r"x: f\.py holds its old text \d times, not once"):
            mutant.apply(text)


def test_only_tests_that_ran_and_failed_kill_a_mutant() -> None:
    mutant = Mutant(name="x", file="f.py", old="a", new="b", killed_by=("t",))
    hanging = Mutant(name="x", file="f.py", old="a", new="b", killed_by=("t",), kills_by_timeout=True)
    assert [judge(mutant, code) for code in (0, 1, 2, 4, 5, None)] == [
        *("SURVIVED", "killed", "BROKEN", "BROKEN", "BROKEN", "TIMEOUT"),
    ]
    assert [judge(hanging, code) for code in (0, 1, None)] == ["SURVIVED", "killed", "killed"]


def test_the_root_is_this_trees() -> None:
    assert (ROOT / "tests" / "unit" / Path(__file__).name).samefile(__file__)
