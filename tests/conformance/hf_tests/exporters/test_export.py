"""In the place of Hugging Face's tests of `torch.export` and its like, which the distribution does not carry."""


class ExportTesterMixin:
    """No tests: those of `torch.export` on our models are in tests/."""
