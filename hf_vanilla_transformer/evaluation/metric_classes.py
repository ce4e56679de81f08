"""The package's scores as `evaluate.Metric`s.

They are used directly, without `evaluate.load`: they keep the text in memory, and make no file, folder, lock or
download. `evaluate.combine` takes them. Importing this module imports `evaluate`, which takes a while.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from inspect import getdoc
from typing import Any, TypeAlias, cast

import datasets
import evaluate
import numpy as np
from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric, Score
from sacrebleu.metrics.bleu import BLEUScore

from ..utils.errors import UserError
from .bleu_tokenizers import check_tokenizer, fitting_tokenizer
from .edit_distance import edit_distance
from .metric_names import TOP, Splitter

#: A metric of one's own: sources, hypotheses and references (the first of each) to one number for each sentence.
SentenceMetric: TypeAlias = Callable[[list[str], list[str], list[str]], Sequence[float]]

#: The reference of a prediction, or several.
Reference: TypeAlias = str | Sequence[str]
#: sacreBLEU's lists of references.
ReferenceColumns: TypeAlias = Sequence[Sequence[str]]

_STRING = datasets.Value("string")
_STRINGS = datasets.Sequence(_STRING)


class TextMetric(evaluate.Metric):
    """A metric of texts.

    Args:
        lowercase: ignore case.

    `compute(predictions=…, references=…)` takes a text for each prediction, and a text or a list of texts for each
    reference.
    """

    key = ""  #: the name of the score in the results and on the command line
    prediction_type = _STRING

    def __init__(self, lowercase: bool = False) -> None:
        self.lowercase = lowercase
        super().__init__(keep_in_memory=True)

    def _build_data_dir(self) -> str:
        """The folder for cached predictions. None is made, because they stay in memory."""
        return self._data_dir_root

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=getdoc(self), citation="", inputs_description="", features=self._inputs()
        )

    def _inputs(self) -> list[datasets.Features]:
        """The types of what `compute` takes, for several references and for one."""
        return [
            datasets.Features(predictions=self.prediction_type, references=references)
            for references in (_STRINGS, _STRING)
        ]

    def cased(self, text: str) -> str:
        """The text as it is compared."""
        return text.lower() if self.lowercase else text

    def normal(self, text: str) -> str:
        """The text as it is compared as a whole. White space at the ends does not count, as in sacreBLEU."""
        return self.cased(text).strip()


class RatioMetric(TextMetric):
    """A metric whose scores are ratios of sums over the sentences."""

    def statistics(
        self,
        predictions: Sequence[Any],
        references: Sequence[Reference],
        sources: Sequence[str] | None = None,
    ) -> dict[str, np.ndarray]:
        """The numerator and the denominator of each sentence, (N, 2), by the name of the score."""
        raise NotImplementedError

    def _compute(self, **inputs: Any) -> dict[str, float]:
        by_score = self.statistics(**inputs)
        return {name: ratio(rows.sum(axis=0)) for name, rows in by_score.items()}


def ratio(sums: np.ndarray) -> float:
    """The quotient of two sums, (2,). A denominator of 0 counts as 1, as in jiwer for references without a token."""
    return float(sums[0] / max(sums[1], 1))


class FunctionMetric(RatioMetric):
    """The mean of a function's numbers for the sentences.

    Args:
        name: of the score.
        function: from the lists of sources, predictions and first references to one number for each.
    """

    def __init__(self, name: str, function: SentenceMetric) -> None:
        self.key = name
        self.function = function
        super().__init__()

    def _inputs(self) -> list[datasets.Features]:
        return [datasets.Features(sources=_STRING, predictions=_STRING, references=_STRINGS)]

    def statistics(
        self,
        predictions: Sequence[Any],
        references: Sequence[Reference],
        sources: Sequence[str] | None = None,
    ) -> dict[str, np.ndarray]:
        first = [alternatives(row)[0] for row in references]
        numbers = np.asarray(
            self.function(list(sources or ()), list(predictions), first), dtype=np.float64
        )
        if numbers.shape != (len(first),):
            raise UserError(
                f"{self.key}: it returned shape {numbers.shape}; one number for each of {len(first)} is needed"
            )
        if wrong := np.flatnonzero(~np.isfinite(numbers)).tolist():
            raise UserError(f"{self.key}: it returned {numbers[wrong[0]]} for line {wrong[0] + 1}")
        return {self.key: np.stack([numbers, np.ones(len(numbers))], axis=1)}


class SacrebleuMetric(TextMetric):
    """A metric that sacreBLEU computes (Post 2018)."""

    def scorer(self, references: ReferenceColumns) -> Metric:
        """sacreBLEU's object for these lists of references."""
        raise NotImplementedError

    def _compute(
        self, predictions: Sequence[str], references: Sequence[Reference], **options: object
    ) -> dict[str, float | str | list[float]]:
        columns = reference_columns(references)
        scorer = self.scorer(columns)
        score = scorer.corpus_score(list(predictions), columns)
        signature = f"{score.name}|{scorer.get_signature()}"
        return {self.key: score.score, f"{self.key}_signature": signature} | self._details(score)

    def _details(self, score: Score) -> dict[str, float | list[float]]:
        return {}


class Bleu(SacrebleuMetric):
    """BLEU (Papineni et al. 2002).

    Args:
        tokenize: sacreBLEU's tokenizer. None is the one that fits the script of the references.
        lowercase: ignore case.
    """

    key = "bleu"

    def __init__(self, tokenize: str | None = None, lowercase: bool = False) -> None:
        if tokenize:
            check_tokenizer(tokenize)
        self.tokenize = tokenize
        super().__init__(lowercase)

    def scorer(self, references: ReferenceColumns) -> BLEU:
        texts = [text for text in references[0] if text is not None]
        tokenize = self.tokenize or fitting_tokenizer(texts)
        # `force`: no warning that the text looks tokenised, as "none" expects
        return BLEU(tokenize=tokenize, lowercase=self.lowercase, force=tokenize == "none")

    def _details(self, score: Score) -> dict[str, float | list[float]]:
        bleu = cast(BLEUScore, score)
        return {
            "brevity_penalty": bleu.bp,
            "precisions": list(bleu.precisions),
            "hypothesis_length": bleu.sys_len,
            "reference_length": bleu.ref_len,
        }


class Chrf(SacrebleuMetric):
    """chrF (Popović 2015)."""

    key = "chrf"
    word_order = 0

    def scorer(self, references: ReferenceColumns) -> CHRF:
        return CHRF(lowercase=self.lowercase, word_order=self.word_order)


class ChrfPlusPlus(Chrf):
    """chrF++ (Popović 2017): chrF with words and pairs of words."""

    key = "chrf++"
    word_order = 2


class Ter(SacrebleuMetric):
    """TER (Snover et al. 2006), with sacreBLEU's defaults, which ignore case."""

    key = "ter"

    def scorer(self, references: ReferenceColumns) -> TER:
        return TER()


class RateMetric(RatioMetric):
    """A metric in percent: of counts and of the units that they are counted in, both for each sentence."""

    def counts(self, predictions: Iterable[str], references: Iterable[Reference]) -> np.ndarray:
        """Counts and units, (N, 2)."""
        raise NotImplementedError

    def statistics(
        self,
        predictions: Sequence[Any],
        references: Sequence[Reference],
        sources: Sequence[str] | None = None,
    ) -> dict[str, np.ndarray]:
        return {self.key: self.counts(predictions, references) * (100, 1)}


class ExactMatch(RateMetric):
    """The percentage of predictions that equal a reference. Spaces at the ends do not count, as in sacreBLEU."""

    key = "exact_match"

    def counts(self, predictions: Iterable[str], references: Iterable[Reference]) -> np.ndarray:
        rows = zip(predictions, references, strict=True)
        return np.array(
            [(self.normal(text) in map(self.normal, alternatives(row)), 1) for text, row in rows],
            dtype=np.float64,
        )


class SequenceErrorRate(ExactMatch):
    """The percentage of predictions that equal no reference: of pronunciations the word error rate."""

    key = "sequence_error_rate"

    def counts(self, predictions: Iterable[str], references: Iterable[Reference]) -> np.ndarray:
        equal, one = super().counts(predictions, references).T
        return np.stack([one - equal, one], axis=1)


class TopK(RatioMetric):
    """The percentage of n-best lists with a reference among their first k, for each k up to the longest list.

    A prediction is a list of texts, best first.
    """

    key = "top_k"
    prediction_type = _STRINGS

    def statistics(
        self,
        predictions: Sequence[Any],
        references: Sequence[Reference],
        sources: Sequence[str] | None = None,
    ) -> dict[str, np.ndarray]:
        longest = max(1, *map(len, predictions))
        ranks = np.array(list(map(self._rank, predictions, references)))
        return {
            f"top_{k}": np.stack([100 * (ranks <= k), np.ones(len(ranks))], axis=1)
            for k in TOP
            if k <= longest
        }

    def _rank(self, texts: Sequence[str], references: Reference) -> float:
        """The place of the first reference in an n-best list, from 1."""
        wanted = set(map(self.normal, alternatives(references)))
        places = (place for place, text in enumerate(texts, 1) if self.normal(text) in wanted)
        return next(places, math.inf)


class TokenErrorRate(RateMetric):
    """Edits of tokens, in percent of the tokens of the references, as jiwer's `wer`.

    It is the word error rate of text, and the phoneme error rate of phonemes. Of several references the nearest
    counts.

    Args:
        lowercase: ignore case.
        split: returns the tokens of a text without white space at its ends. None separates them at white space.
    """

    key = "token_error_rate"

    def __init__(self, lowercase: bool = False, split: Splitter | None = None) -> None:
        self.split = split
        super().__init__(lowercase)

    def tokens(self, text: str) -> Sequence[str]:
        """The tokens of a text."""
        if self.split is not None:
            return self.split(self.normal(text))
        words = re.sub(r"\s\s+", " ", self.cased(text)).strip().split(" ")
        return [word for word in words if word]

    def counts(self, predictions: Iterable[str], references: Iterable[Reference]) -> np.ndarray:
        counts = []
        for text, row in zip(predictions, references, strict=True):
            tokens = self.tokens(text)
            by_reference = [
                (edit_distance(each, tokens), len(each))
                for each in map(self.tokens, alternatives(row))
            ]
            counts.append(min(by_reference))
        return np.array(counts, dtype=np.float64)


class CharacterErrorRate(TokenErrorRate):
    """Edits of characters, in percent of the characters of the references, as jiwer's `cer`."""

    key = "character_error_rate"

    def tokens(self, text: str) -> Sequence[str]:
        return self.cased(text).strip()


CLASSES: dict[str, type[TextMetric]] = {
    each.key: each
    for each in (
        Bleu,
        Chrf,
        ChrfPlusPlus,
        Ter,
        ExactMatch,
        TopK,
        TokenErrorRate,
        CharacterErrorRate,
        SequenceErrorRate,
    )
}


def alternatives(references: Reference) -> list[str]:
    """The references of one prediction, which may be one text."""
    return [references] if isinstance(references, str) else list(references)


def reference_columns(references: Iterable[Reference]) -> list[list[str]]:
    """sacreBLEU's lists of references, from the references of each prediction."""
    rows = [alternatives(row) for row in references]
    count = max(map(len, rows))
    return [[row[place] if place < len(row) else None for row in rows] for place in range(count)]  # type: ignore[misc]
