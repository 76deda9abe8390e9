#!/usr/bin/env bash
# Trains a small ResNet on real digits as a pipeline of two stages.
# Usage: bash tools/quickstart.sh [flags of trainers.image_classification]
set -euo pipefail
cd "$(dirname "$0")/.."
bash tools/setup_venv.sh > /dev/null
# Hides TensorFlow's messages at start, such as that there is no GPU.
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
exec .venv/bin/python -m trainers.image_classification "$@"
