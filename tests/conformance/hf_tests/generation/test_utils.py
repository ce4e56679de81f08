"""In the place of Hugging Face's tests of `generate`, which the distribution does not carry."""


class GenerationTesterMixin:
    """No tests: ours compare generation with Marian's, in tests/. `ModelTesterMixin` asks for this base class."""
