#!/usr/bin/env bash
# Tries the library out on a GPU, and prints a line of JSON a check.
# Usage: bash tools/gpu/check.sh [--cpu] [--only NAME ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
# Where TensorFlow was brought in another way, there is no .venv.
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m tools.gpu "$@"
