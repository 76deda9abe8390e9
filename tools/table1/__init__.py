"""Table 1 of the GPipe paper beside what is planned and measured here."""
