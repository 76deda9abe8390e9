#!/usr/bin/env bash
# Lint, types and tests.
# Usage: bash tools/test.sh [--slow] [arguments of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."
bash tools/setup_venv.sh
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
export PATH="$PWD/.venv/bin:$PATH"

marks=(-m "not slow")
if [ "${1:-}" = --slow ]; then
  marks=()
  shift
fi
ruff check .
ruff format --check .
mypy
# Two processes, each with its own TensorFlow.
exec python -m pytest --numprocesses=2 --dist=worksteal "${marks[@]}" "$@"
