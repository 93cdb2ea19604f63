#!/usr/bin/env bash
# Install the environment, then run pytest in four processes, each with whole files and one thread.
#     scripts/test.sh                      the fast suite
#     scripts/test.sh -k packing           pytest with these arguments (paths, -k, -x, ...) instead of the fast suite's
#     scripts/test.sh --all                everything: also the cases marked full, and every bug of scripts/mutants
#     scripts/test.sh --emulated-gpu       the GPU path on emulated GPUs (docs/gpu.md); with --all or other arguments of pytest behind it
# docs/testing.md lists the tests that only --all runs.
set -euo pipefail
start=$SECONDS
[[ "${1:-}" != --emulated-gpu ]] || export COATI_DEVICE=emulated_gpu # an environment with the CUDA packages
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
cd -- "$REPOSITORY"

# Four processes, since many tests wait and leave cores idle. Files start in the order of collection, so that the long ones (faults,
# integration) come first; tests/conftest.py defines which tests stay together.
SUITE=(tests --numprocesses 4 --dist loadfile --no-loadscope-reorder --durations 20 --durations-min 1)
status=0
case "$*" in
    "") "$PYTHON" -m pytest "${SUITE[@]}" || status=$? ;;
    --all)
        if ! command -v chromium >/dev/null && [[ $EUID -eq 0 ]] && command -v apt-get >/dev/null; then # for the report in a browser
            (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium) >/dev/null || true # its tests say that they were skipped
        fi
        "$PYTHON" -m pytest "${SUITE[@]}" --all || status=$?
        "$PYTHON" scripts/mutants/run.py || status=$?
        ;;
    --emulated-gpu*)
        tests/emulated_gpu/build.sh "$PYTHON" "$VENV/emulated_gpu"
        tests/emulated_gpu/run.sh "$PYTHON" -m pytest -m gpu tests/gpu tests/integration/gpu tests/emulated_gpu "${@:2}" || status=$?
        [[ " $* " != *" --all "* ]] || tests/emulated_gpu/run.sh "$PYTHON" scripts/mutants/run.py --emulated-gpu --jobs 1 || status=$?
        ;;
    *) "$PYTHON" -m pytest "$@" || status=$? ;;
esac
printf '[test] %d min %02d s in total\n' $(((SECONDS - start) / 60)) $(((SECONDS - start) % 60))
exit "$status"
