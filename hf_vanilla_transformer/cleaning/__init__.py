"""Which pairs of a corpus are likely to be wrong, and rows of a table without them."""
