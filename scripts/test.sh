#!/usr/bin/env bash
# The fast suite: makes the environment, then runs pytest in two processes, each with whole files and one thread.
#     scripts/test.sh                      the fast suite
#     scripts/test.sh -k packing           pytest's arguments take the place of the fast suite's (paths, -k, -x, ...)
#     scripts/test.sh --all                everything: also the cases marked full, and every bug of scripts/mutants
# docs/testing.md says what is left to --all.
set -euo pipefail
start=$SECONDS
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
cd -- "$REPOSITORY"

# Begun in the order in which they are collected, so that the long ones (faults, integration) come first; tests/conftest.py says what
# stays together.
SUITE=(tests --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 20 --durations-min 1)
status=0
case "$*" in
    "") "$PYTHON" -m pytest "${SUITE[@]}" || status=$? ;;
    --all)
        "$PYTHON" -m pytest "${SUITE[@]}" --all || status=$?
        "$PYTHON" scripts/mutants/run.py || status=$?
        ;;
    *) "$PYTHON" -m pytest "$@" || status=$? ;;
esac
printf '[test] %d min %02d s in all\n' $(((SECONDS - start) / 60)) $(((SECONDS - start) % 60))
exit "$status"
