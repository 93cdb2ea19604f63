#!/usr/bin/env bash
# Install packages that only a test needs in a folder beside the environment, and print the folder.
#
#     scripts/extra_packages.sh PYTHON NAME         # those of requirements/NAME.in: vllm-server, ray-jobs
#
# Tests of engines by URL, and of submitted Ray jobs, put it on the PYTHONPATH of the servers that they start; the environment stays
# as it is.
set -euo pipefail

REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PINS="$REPOSITORY/requirements/$2.in"
FOLDER="$REPOSITORY/.cache/$2-$(sha256sum "$PINS" | cut -c1-12)"
if [[ ! -d "$FOLDER" ]]; then
    PART="$(mktemp -d -p "$(mkdir -p "$REPOSITORY/.cache" && echo "$REPOSITORY/.cache")" "$2.XXXXXX")"
    trap 'rm -rf "$PART"' EXIT
    "$1" -m pip install --quiet --disable-pip-version-check --no-deps --target "$PART" -r "$PINS" >&2
    mv -T "$PART" "$FOLDER" 2>/dev/null || [[ -d "$FOLDER" ]] # another test may have been first
fi
printf '%s\n' "$FOLDER"
