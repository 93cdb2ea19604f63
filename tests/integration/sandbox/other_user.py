"""Run attacks as a user other than root: places and names are read as JSON, a JSON line is written per attack.

python -m tests.integration.sandbox.other_user PLACES NAMES. Root becomes somebody else first. The sandbox then
makes a user namespace for itself.
"""

import json
import os
import sys

from coati_rl.sandbox import Limits, Sandbox
from tests.integration.sandbox import (
    attacks_on_isolation,
    attacks_on_memory,
    attacks_on_processes,
    attacks_on_the_kernel,
)
from tests.integration.sandbox.running import end_of, own_processes, run_attack

USER = 54321  # nobody's
ON_ISOLATION = (*attacks_on_isolation.ATTACKS, *attacks_on_the_kernel.ATTACKS)
ON_RESOURCES = (*attacks_on_processes.ATTACKS, *attacks_on_memory.ATTACKS)
ATTACKS = (*ON_ISOLATION, *ON_RESOURCES)


def main() -> None:
    """Run them, one after another."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(USER)
        os.setuid(USER)
    places, names = map(json.loads, sys.argv[1:])
    with Sandbox() as sandbox:
        sandbox.run("", limits=Limits())
        processes = own_processes()
        for attack in (attack for attack in ATTACKS if attack.name in names):
            after = run_attack(sandbox, attack, places)
            line = {
                "name": attack.name,
                "user": os.geteuid(),
                "end": end_of(after.outcome),
                "output": after.outcome.output.decode(errors="replace")[:2000],
                "error_output": after.outcome.error_output.decode(errors="replace")[-2000:],
                "next_output": after.next_output.decode(errors="replace"),
                "is_alone": after.processes == processes,
            }
            sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
