"""Helpers that every subpackage may use. They import nothing of the package but each other."""
