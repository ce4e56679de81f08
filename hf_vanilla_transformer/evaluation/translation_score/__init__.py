"""A local `evaluate` module; load it with `evaluate.load(TRANSLATION_SCORE)`, it needs no network."""
