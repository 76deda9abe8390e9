#!/usr/bin/env bash
# Builds the documentation into build/docs. Broken links are errors.
# Usage: bash tools/docs.sh [flags of mkdocs build]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(bash tools/setup_venv.sh)
# Hides the theme's advertisement for its successor.
export NO_MKDOCS_2_WARNING=1
exec "$venv/bin/python" -m mkdocs build "$@"
