#!/usr/bin/env bash
# Makes or reuses .venv in the checkout, with the package and all extras.
# Usage: bash tools/setup_venv.sh [--gpu]
#   --gpu   with the CUDA libraries that TensorFlow needs (some gigabytes)
set -euo pipefail
cd "$(dirname "$0")/.."

extras=trainers,tools,tests
# What is installed follows from these two files, and from --gpu.
stamp=".venv/stamp-$(cat setup.cfg pyproject.toml | cksum | tr -d ' ')"
if [ "${1:-}" = --gpu ]; then
  extras+=,gpu
  stamp+=-gpu
elif [ -n "${1:-}" ]; then
  echo "Usage: bash tools/setup_venv.sh [--gpu]" >&2
  exit 2
fi
# What has CUDA has all else.
if [ -e "$stamp" ] || [ -e "$stamp-gpu" ]; then
  exit 0
fi

python=
for candidate in python3.11 python3.12 python3.13 python3; do
  if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
      2> /dev/null; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  echo "tf_gpipe needs Python 3.11 or newer, and found none." >&2
  exit 1
fi
echo "Setting up .venv (once; some minutes)" >&2
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m pip install --quiet --editable ".[$extras]" >&2
rm -f .venv/stamp-*
touch "$stamp"
