"""A model of sequences that are no language: reactions, phonemes, code, formulas. One line is one sequence."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..documents.documents import Part
from ..engine.continuous import FoundHypothesis
from ..inference.candidates import merge_candidates
from ..inference.hypothesis import Hypothesis
from ..inference.line_warnings import LineWarnings
from ..inference.translator import Translator
from ..text.token_kinds import has_closed_vocabulary
from .schemas import PageRequest, Prediction
from .service import LanguagePair, Prepared


class SequenceModel(LanguagePair):
    """Predicts targets of sequences, with the page and the engine of a language pair.

    Args:
        name: in messages and metrics.
        translator: of the model.
        site: content of `site.json`.
        engine: arguments of `Engine`.
    """

    item = "sequence"

    def __init__(
        self,
        name: str,
        translator: Translator,
        site: Mapping[str, object] | None = None,
        **engine: Any,
    ) -> None:
        super().__init__("", "", translator, None, site, **engine)
        self.name = name

    async def predict(
        self, texts: Sequence[str], n_best: int, warnings: list[str]
    ) -> list[list[Prediction]]:
        """The predictions of each text, best first. All texts wait in the queue together.

        Args:
            texts: each is brought to the form of the model's source. A blank one has one prediction, an empty text.
            n_best: hypotheses of each text, at most `engine.num_beams`. The same texts are one prediction.
            warnings: receives a line for unknown symbols, one for texts that cannot be brought to the form, and one
                for predictions without an end.

        Raises:
            UserError, TooLong, QueueFull: as in `translate`.
        """
        filled = [(number, text) for number, text in enumerate(texts, start=1) if text.strip()]
        ids = await self._encoded(filled, warnings)
        hypotheses = await self._hypotheses([text for _, text in filled], ids, n_best, warnings)
        following = iter(await self._map(self._predictions, hypotheses))
        blank = [Prediction(text="", score=0.0, probability=1.0)]
        return [next(following) if text.strip() else blank for text in texts]

    async def page_translation(self, request: PageRequest) -> dict[str, Any]:
        """As of a language pair, with `predictions`: what `predict` returns for the line at the caret."""
        answer = await super().page_translation(request)
        found = [FoundHypothesis(one["tokens"], one["score"]) for one in answer["hypotheses"]]
        predict = partial(self._predictions, given=len(request.prefix))
        lists = await self._map(predict, [found] if found else [])
        answer["predictions"] = [one.model_dump() for of_line in lists for one in of_line]
        return answer

    async def _encoded(
        self, numbered: Sequence[tuple[int, str]], warnings: list[str]
    ) -> list[list[int]]:
        """The token ids of texts with their line numbers, and warnings about the texts."""
        of_lines = LineWarnings()

        def encode(line: tuple[int, str]) -> list[int]:
            number, text = line
            return self._encode(text, number, of_lines)

        ids = await self._map(encode, numbered)
        warnings += of_lines.warnings()
        return ids

    async def unknown(self, texts: Sequence[str]) -> list[list[str]] | None:
        """The symbols of each text that the model does not know. None if its vocabulary is not closed."""
        if not has_closed_vocabulary(self.translator.source_tokenizer):
            return None
        return await self._map(self.translator.unknown_in, texts)

    def _predictions(
        self, hypotheses: Sequence[FoundHypothesis], given: int = 0
    ) -> list[Prediction]:
        """The different texts of hypotheses, whose first `given` tokens were forced."""
        rows = zip(self._decode_all(hypotheses), hypotheses, strict=True)
        found = [
            Hypothesis(text, one.score, log_probability=self.engine.log_probability(one, given))
            for text, one in rows
        ]
        return [
            Prediction(
                text=one.text,
                score=None if one.score is None else round(one.score, 4),
                probability=round(one.probability, 5),
            )
            for one in merge_candidates([found])
        ]

    async def _split(
        self, texts: Sequence[str], warnings: list[str]
    ) -> tuple[list[list[Part]], Prepared]:
        """The lines of each text. Nothing in a line is layout."""
        lines = [line for text in texts for line in text.splitlines() or [""]]
        filled = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
        ids = await self._encoded(filled, warnings)
        rows = zip(filled, ids, strict=True)
        return [_lines(text) for text in texts], {line: (None, row) for (_, line), row in rows}


def _lines(text: str) -> list[Part]:
    parts: list[Part] = []
    for content, line in zip(text.splitlines(), text.splitlines(keepends=True), strict=True):
        parts.append(Part(content, bool(content.strip())))
        parts.append(Part(line[len(content) :], False))
    return [part for part in parts if part.text]
