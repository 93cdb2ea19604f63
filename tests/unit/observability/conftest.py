"""Use a fixture of tests/unit/groups.py here."""

from tests.unit.groups import forked_group

__all__ = ["forked_group"]
