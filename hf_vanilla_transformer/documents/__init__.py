"""Whole documents: HTML, Markdown, office files, subtitles and translation files.

Only the command and the server import this subpackage.
"""
