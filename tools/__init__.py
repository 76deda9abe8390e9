"""Commands of developers: benchmarks, checks, data sets and set-up."""
