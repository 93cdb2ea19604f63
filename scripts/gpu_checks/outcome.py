"""What a check hands back: figures by name, and what is wrong. JSON carries both out of the check's process."""

from dataclasses import dataclass, field

Figure = float | int | str | None


class CheckError(Exception):
    """A check cannot go on; the message says what it waited for or what it got."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Filled while the check runs."""

    figures: dict[str, Figure] = field(default_factory=dict)  # names carry the unit
    problems: list[str] = field(default_factory=list)  # none: the check has passed
    needs: str | None = None  # a package that is not installed: the check was not run

    def expect(self, is_met: bool, problem: str) -> None:
        """Note the problem unless the expectation is met."""
        if not is_met:
            self.problems.append(problem)
