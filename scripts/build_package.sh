#!/usr/bin/env bash
# Build the wheel and the source distribution, and print their paths, the wheel first.
#
#     scripts/build_package.sh [FOLDER]         # default: dist/
#
# They are built from a copy, so that nothing else is written in the repository. PYTHON is the interpreter, which needs setuptools; by
# default that of .venv, and without one python3.
set -euo pipefail

REPOSITORY="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
[[ -n "${PYTHON:-}" || ! -x "$REPOSITORY/.venv/bin/python" ]] || PYTHON="$REPOSITORY/.venv/bin/python"
"${PYTHON:=python3}" -c 'import setuptools.build_meta' 2>/dev/null || {
    printf '%s: has no setuptools, which builds packages: make .venv (source scripts/environment.sh), or set PYTHON\n' "$PYTHON" >&2
    exit 2
}
FOLDER="$(mkdir -p "${1:-$REPOSITORY/dist}" && cd -- "${1:-$REPOSITORY/dist}" && pwd)"
COPY="$(mktemp -d)"
trap 'rm -rf "$COPY"' EXIT
(cd -- "$REPOSITORY" && cp -r --parents setup.py pyproject.toml README.md LICENSE rl_example.py rl_generate.py coati coati_rl producer consumer rewards "$COPY")
"$PYTHON" - "$FOLDER" "$COPY" <<'PROGRAM'
import contextlib
import io
import os
import sys

import setuptools.build_meta as backend

folder, copy = sys.argv[1:]  # before setuptools writes its own arguments there
os.chdir(copy)
with contextlib.redirect_stdout(io.StringIO()):  # setuptools names every file
    built = [build(folder) for build in (backend.build_wheel, backend.build_sdist)]
print(*(f"{folder}/{name}" for name in built), sep="\n")
PROGRAM
