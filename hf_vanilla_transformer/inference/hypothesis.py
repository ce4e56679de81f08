"""A translation with its score and alignment."""

from dataclasses import dataclass, field

from .alignment import Link


@dataclass(frozen=True)
class Hypothesis:
    """One of the translations that a search returned.

    `score` ranks hypotheses: the log-probability over the length penalty, or None after greedy search. Tokens
    of a forced prefix count neither for the probability nor for the length. Only the token of a language counts for
    the length, as with `forced_bos_token_id` of `generate`, in fairseq and in CTranslate2. `alignment` has (source
    word, target word) pairs, `tokens` and `probabilities` have one entry for each token, with the end-of-sentence
    token and a forced prefix. They are None unless requested.
    """

    text: str
    score: float | None = None
    alignment: list[Link] | None = None
    tokens: list[str] | None = None
    probabilities: list[float] | None = None
    #: natural logarithm of its probability, None if the search gave no score and no probabilities were requested
    log_probability: float | None = field(default=None, repr=False, compare=False)
    #: whether it ends by itself and not at the length limit
    ended: bool = field(default=True, repr=False, compare=False)
    #: symbols of the source that a closed vocabulary lacks. None for other vocabularies
    unknown: tuple[str, ...] | None = field(default=None, repr=False, compare=False)

    @property
    def pharaoh(self) -> str:
        """The alignment in the Pharaoh format of word aligners: `0-0 1-2`."""
        return " ".join(f"{source}-{target}" for source, target in self.alignment or [])
