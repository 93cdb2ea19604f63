"""Use the fixtures of tests/unit/groups.py here."""

from tests.unit.groups import forked_group, group_of, make_coordinator, make_group, make_prompts, make_settings

__all__ = ["forked_group", "group_of", "make_coordinator", "make_group", "make_prompts", "make_settings"]
