"""Run attacks in a sandbox and return what became of both."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import psutil

from coati_rl.sandbox import Limits, Outcome, Sandbox
from tests.integration.sandbox.attack import Attack

_MAX_ATTEMPTS = 5
T = TypeVar("T")
NEXT = "print(input()[::-1])"


@dataclass(frozen=True, kw_only=True, slots=True)
class Aftermath:
    """Of one attack."""

    outcome: Outcome
    processes: tuple[int, ...]  # started by this process and alive, before the next program
    next_output: bytes  # of a program that is right, run in the same sandbox


def once_decided(run: Callable[[], T], is_undecided: Callable[[T], bool]) -> T:
    """The result of a run; of another one if others had the machine for so long that it says nothing."""
    for _ in range(_MAX_ATTEMPTS - 1):
        result = run()
        if not is_undecided(result):
            return result
    return run()


def own_processes() -> tuple[int, ...]:
    """Ids of all that this process has started, and of all that those have, and so on."""
    return tuple(sorted(process.pid for process in psutil.Process().children(recursive=True)))


def run_attack(sandbox: Sandbox, attack: Attack, places: Mapping[str, str]) -> Aftermath:
    """Fill in the places of an attack and run it."""
    source = attack.source
    for place, value in places.items():
        source = source.replace(f"@{place}@", value)
    # Its time is on the clock, less what it waited for a core. For pages it waits on a busy machine as well.
    undecided = {"starved", "wall"} - set(attack.ends)
    outcome = once_decided(lambda: sandbox.run(source, limits=attack.limits), lambda outcome: outcome.end in undecided)
    processes = own_processes()
    return Aftermath(
        outcome=outcome,
        processes=processes,
        next_output=sandbox.run(NEXT, stdin=b"txen\n", limits=Limits()).output,
    )


def end_of(outcome: Outcome) -> str:
    """As attacks name it."""
    return f"{outcome.end} {outcome.code}" if outcome.end in ("exit", "signal") else outcome.end
