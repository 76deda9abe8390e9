#!/usr/bin/env bash
# Makes or reuses .venv in the checkout, with the package and all extras.
# Usage: bash tools/setup_venv.sh
set -euo pipefail
cd "$(dirname "$0")/.."

# What is installed follows from these two files.
stamp=".venv/stamp-$(cat setup.cfg pyproject.toml | cksum | tr -d ' ')"
[ -e "$stamp" ] && exit 0

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
.venv/bin/python -m pip install --quiet --editable '.[trainers,tools,tests]' >&2
rm -f .venv/stamp-*
touch "$stamp"
