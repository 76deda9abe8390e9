"""Checks on a GPU, most valuable first: `bash tools/gpu/check.sh`."""
