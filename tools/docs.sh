#!/usr/bin/env bash
# Builds the documentation, in build/docs. Broken links are errors.
# Usage: bash tools/docs.sh [flags of mkdocs build]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(bash tools/setup_venv.sh)
# The theme tells of its successor.
export NO_MKDOCS_2_WARNING=1
exec "$venv/bin/python" -m mkdocs build "$@"
