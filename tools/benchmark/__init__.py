"""Benchmarks of tf_gpipe: `python -m tools.benchmark --help`."""
