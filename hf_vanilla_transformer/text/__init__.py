"""Words, language codes, tokens and tokenizers: what is known of a text, without a corpus."""

from .. import stub_names

__getattr__, __all__ = stub_names(__name__, __file__)
