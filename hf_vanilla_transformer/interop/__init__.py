"""Conversion from and to other toolkits: one module for each format.

A function that reads or writes a format raises a `UserError` if a file is missing or damaged, if the target format
cannot express the model, or if a library is not installed.
"""
