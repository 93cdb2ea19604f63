#!/usr/bin/env bash
# All tests: makes the environment, then runs pytest on one thread. Arguments go to pytest: scripts/test.sh -k rewards
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
cd -- "$REPOSITORY"
exec "$PYTHON" -m pytest tests "$@"
