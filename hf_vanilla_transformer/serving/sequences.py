"""A model of sequences that are no language: reactions, phonemes, code, formulas. One line is one sequence."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..data.token_kinds import tokenizer_task
from ..data.tokenizer_files import load_tokenizers
from ..documents.documents import Part
from ..engine.continuous import FoundHypothesis
from ..inference.candidates import Merger
from ..inference.hypothesis import Hypothesis
from ..inference.translator import Translator
from ..inference.unknown import UnknownSymbols
from ..utils.errors import UserError
from .schemas import PageRequest, Prediction
from .service import LanguagePair, Notes, Prepared

_NAMES = "give each a name of its own, as in NAME="
# The other characters have a meaning in addresses, routes or metrics.
_NAME = re.compile(r'[^/\\{}?#%"\x00-\x1f]+')


def sequence_folders(arguments: Sequence[str]) -> tuple[dict[str, Path], list[str]]:
    """The folders of models of sequences by name, and the other arguments.

    Args:
        arguments: `FOLDER`, whose name is that of the model, or `NAME=FOLDER`.
    """
    folders: dict[str, Path] = {}
    others: list[str] = []
    for argument in arguments:
        name, _, rest = argument.partition("=")
        whole = Path(argument)
        folder = whole if whole.is_dir() or not rest else Path(rest)
        if not folder.is_dir() or tokenizer_task(*load_tokenizers(folder)) == "language":
            others.append(argument)
            continue
        if folder is whole:
            name = folder.resolve().name
        if not _NAME.fullmatch(name):
            raise UserError(f"--model: {name!r} cannot be part of an address: {_NAMES}{folder}")
        if name in folders:
            raise UserError(
                f"--model: {folders[name]} and {folder} are both {name}: {_NAMES}{folder}"
            )
        folders[name] = folder
    return folders, others


class SequenceModel(LanguagePair):
    """Predicts targets of sequences, with the page and the engine of a language pair.

    Args:
        name: in addresses and requests.
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
        self, texts: Sequence[str], n_best: int, notes: Notes
    ) -> list[list[Prediction]]:
        """The predictions of each text, best first. All texts wait in the queue together.

        Args:
            texts: each goes to the model as it is. A blank one has one prediction, an empty text.
            n_best: hypotheses of each text, at most `engine.num_beams`. The same texts are one prediction.
            notes: receives the warnings.

        Raises:
            UserError, TooLong, QueueFull: as in `translate`.
        """
        filled = [text for text in texts if text.strip()]
        ids = await self._encoded(filled, notes)
        self.check_queue(len(ids))
        futures = self.engine.submit(ids, n_best, self.inspector.mark)
        hypotheses = await asyncio.gather(*map(asyncio.wrap_future, futures))
        self._note_unended(filled, hypotheses, notes)
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

    async def _encoded(self, texts: Sequence[str], notes: Notes) -> list[list[int]]:
        """The token ids of texts, with a warning of unknown symbols."""
        unknown = UnknownSymbols()
        tokenizer = self.translator.source_tokenizer

        def encode(numbered: tuple[int, str]) -> list[int]:
            line, text = numbered
            ids = self._encode(text)
            unknown.check("source", tokenizer, text, ids, line)
            return ids

        ids = await self._map(encode, list(enumerate(texts, start=1)))
        notes.warnings += unknown.warnings()
        return ids

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
            for one in Merger().merge([found])
        ]

    async def _split(self, texts: Sequence[str], notes: Notes) -> tuple[list[list[Part]], Prepared]:
        """The lines of each text. Nothing in a line is layout."""
        parts = [_lines(text) for text in texts]
        lines = [part.text for of_text in parts for part in of_text if part.is_sentence]
        ids = await self._encoded(lines, notes)
        rows = zip(lines, ids, strict=True)
        return parts, {line: (None, numbers) for line, numbers in rows}


def _lines(text: str) -> list[Part]:
    parts: list[Part] = []
    for line in text.splitlines(keepends=True):
        content = line.rstrip("\r\n")
        parts.append(Part(content, bool(content.strip())))
        parts.append(Part(line[len(content) :], False))
    return [part for part in parts if part.text]
