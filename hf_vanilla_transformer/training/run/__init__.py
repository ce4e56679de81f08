"""A run: its arguments, from the corpus to the card."""
