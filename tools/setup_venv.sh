#!/usr/bin/env bash
# Makes or reuses .venv here, with the package and all extras but gpu.
# Usage: bash tools/setup_venv.sh [--gpu | --with REQUIREMENT ...]
#   --gpu   with gpu, too: the CUDA libraries of TensorFlow (some gigabytes)
#   --with  other versions, such as 'tensorflow==2.20.*' or tf-nightly, in an
#           environment of their own; its folder is the last line printed
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
extras=trainers,tools,tests,docs
others=()
kind=
case "${1:-}" in
  "") ;;
  --gpu)
    extras+=,gpu
    kind=-gpu
    ;;
  --with)
    shift
    others=("$@")
    venv+=-$(printf '%s\n' "$@" | cksum | tr -d ' ')
    ;;
  *)
    sed -n '3,6s/^# //p' "$0" >&2
    exit 2
    ;;
esac
# These two files and the arguments decide what is installed.
stamp="$venv/stamp-$(cat setup.cfg pyproject.toml | cksum | tr -d ' ')$kind"
# An environment with the CUDA libraries has everything else, too.
if [ -e "$stamp" ] || [ -e "$stamp-gpu" ]; then
  echo "$venv"
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
echo "Setting up $venv (once; some minutes)" >&2
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip)
"${pip[@]}" install --quiet --editable ".[$extras]" >&2
for other in "${others[@]}"; do
  # Nightly packages have other names but install the same files.
  case "$other" in
    tf-nightly* | tf_nightly*) "${pip[@]}" uninstall --yes tensorflow >&2 ;;
    keras-nightly*) "${pip[@]}" uninstall --yes keras >&2 ;;
  esac
done
if [ "${#others[@]}" -gt 0 ]; then
  # pip only warns of versions that setup.cfg does not allow.
  "${pip[@]}" install --quiet --upgrade "${others[@]}" >&2
fi
rm -f "$venv"/stamp-*
touch "$stamp"
echo "$venv"
