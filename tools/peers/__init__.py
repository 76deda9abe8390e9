"""Programs that train the benchmark's models, each with another library."""
