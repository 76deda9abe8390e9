#!/usr/bin/env bash
# Runs the linter, the type checker and the tests.
# Usage: bash tools/test.sh [--with REQUIREMENT ...] [--slow] [pytest arguments]
#   --with  runs only the tests, with other versions: 'tensorflow==2.20.*'
#           'keras==3.15.*'. The list ends at an argument that begins with -
#   --slow  runs the slow tests, too
set -euo pipefail
cd "$(dirname "$0")/.."
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"

others=()
if [ "${1:-}" = --with ]; then
  shift
  while [ "$#" -gt 0 ] && [ "${1#-}" = "$1" ]; do
    others+=("$1")
    shift
  done
  venv=$(bash tools/setup_venv.sh --with "${others[@]}")
else
  venv=$(bash tools/setup_venv.sh)
fi
export PATH="$PWD/$venv/bin:$PATH"

marks=(-m "not slow")
if [ "${1:-}" = --slow ]; then
  marks=()
  shift
fi
if [ "${#others[@]}" -eq 0 ]; then
  ruff check .
  ruff format --check .
  mypy
fi
limits=()
if [ -z "${TF_GPIPE_TEST_ALL:-}" ]; then
  # A test that hangs ends its process after ten minutes, and prints what each
  # thread does. It fails, and the others go on.
  limits=(-o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true)
fi
# Three processes for two cores, as many tests wait for other processes.
exec python -m pytest --numprocesses=3 --dist=worksteal "${limits[@]}" \
  "${marks[@]}" "$@"
