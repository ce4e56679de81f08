"""Compare somebody's implementation of the Transformer with the paper, and name the first mistake."""
