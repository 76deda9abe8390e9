#!/usr/bin/env bash
# Tries the library out on a GPU, and prints a line of JSON for each check.
# Usage: bash tools/gpu/check.sh [--cpu] [--only NAME ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
# There is no .venv where TensorFlow was installed in another way.
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m tools.gpu "$@"
