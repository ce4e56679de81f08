"""Programs that measure this package beside its peers, and their reports."""
