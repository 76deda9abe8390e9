"""Which layers form which stage."""
