"""Commands around the library: benchmarks, tests, set-up."""
