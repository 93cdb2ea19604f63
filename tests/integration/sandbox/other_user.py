"""Run all attacks as somebody who is not root: places come as JSON, results go as one JSON line per attack.

python -m tests.integration.sandbox.other_user PLACES. Root becomes somebody else first. The sandbox then
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
ATTACKS = (
    *attacks_on_isolation.ATTACKS,
    *attacks_on_the_kernel.ATTACKS,
    *attacks_on_processes.ATTACKS,
    *attacks_on_memory.ATTACKS,
)


def main() -> None:
    """Run them all, one after another."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(USER)
        os.setuid(USER)
    places = json.loads(sys.argv[1])
    with Sandbox() as sandbox:
        sandbox.run("", limits=Limits())
        processes = own_processes()
        for attack in ATTACKS:
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
