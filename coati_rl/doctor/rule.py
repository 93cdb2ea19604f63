"""Define what a rule about a run is, and what it finds."""

from collections.abc import Callable
from dataclasses import dataclass

from coati_rl.doctor.run_data import RunData

Find = Callable[[RunData], str | None]
WRONG, POOR, SLOW = 3, 2, 1  # severities: results are wrong or lost; learning is poor; time is wasted


@dataclass(frozen=True, slots=True)
class Rule:
    """Look for one cause in a run.

    `find` returns the evidence, with numbers and steps, or None. Its docstring says what is compared and why the
    thresholds are what they are; docs/doctor.md is made of it.
    """

    cause: str  # its name in the output of --json
    says: str  # what is wrong, in one sentence
    find: Find
    remedy: str
    severity: int
    leads_to: tuple[str, ...] = ()  # causes whose signs follow from this one


class Rules(list[Rule]):
    """Hold the rules of a subject in their order: of equal severity, the likelier root first."""

    def add(self, severity: int, *, says: str, remedy: str, leads_to: str = "") -> Callable[[Find], Find]:
        """Return what makes a rule of a function, whose name is the cause's; `leads_to` has blanks between causes."""

        def added(find: Find) -> Find:
            causes = tuple(leads_to.split())
            self.append(Rule(find.__name__, says, find, remedy, severity, causes))
            return find

        return added


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Hold a cause that was found."""

    cause: str
    says: str
    evidence: str
    remedy: str
    severity: int
    follows_from: tuple[str, ...]  # other causes that were found and lead to this one; empty: a root cause
