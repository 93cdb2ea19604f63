#!/usr/bin/env bash
# All tests: makes the environment, then runs pytest, one thread a process. Unit tests share the cores, the others get them to
# themselves. Arguments go to pytest: scripts/test.sh -k rewards
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
cd -- "$REPOSITORY"

NO_TESTS_SELECTED=5
status=$NO_TESTS_SELECTED
run() {
    local code=0
    printf '[test] pytest %s\n' "$*"
    "$PYTHON" -m pytest "$@" || code=$?
    if ((code != NO_TESTS_SELECTED && (status == 0 || status == NO_TESTS_SELECTED))); then
        status=$code
    fi
}
run tests/unit --numprocesses 2 --dist loadfile "$@"
run tests/integration tests/faults "$@"
exit "$status"
