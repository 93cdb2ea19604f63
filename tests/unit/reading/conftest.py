"""Use the fixtures of tests/unit/groups.py here."""

from tests.unit.groups import make_prompts

__all__ = ["make_prompts"]
