"""Benchmarks of this package against its peers, and their reports."""
