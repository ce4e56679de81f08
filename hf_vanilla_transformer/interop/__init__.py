"""To and from other programs' formats: one file for each. Nothing of theirs is imported before it is asked for."""
