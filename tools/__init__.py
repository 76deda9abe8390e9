"""Commands for developers: benchmarks, checks, data sets and set-up."""
