"""Table 1 of the GPipe paper, beside plans and measurements."""
