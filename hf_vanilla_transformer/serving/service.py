"""One language pair: from the text of a request to its translation. Runs in the thread of the requests."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UserError
from ..inference.alignment import Link
from ..inference.continuous import FoundHypothesis
from ..inference.documents import Part, Splitter, join_text, sentences_of, split_text
from ..inference.translator import Translator
from .engine import Engine
from .html_text import Passage, TranslatedPart, join_html, split_html
from .inspection import Inspector

#: Attention needs memory for the square of a sentence's length. Models are trained on far shorter ones.
MAX_SENTENCE_TOKENS = 1024


class TooLong(UserError):
    """A request that is larger than the server takes."""


@dataclass(frozen=True)
class _Text:
    """A text of a request, or a passage of one that is HTML, as parts."""

    parts: list[Part]
    passage: Passage | None = None


class LanguagePair:
    """Translates texts from one language into another.

    Args:
        source, target: codes such as "en".
        translator: whose tokenizers are used here, and nowhere else.
        engine: translates sentences. inspector: aligns words, for HTML.
        split: splits a line into sentences; None takes a line as one sentence.
    """

    def __init__(
        self,
        source: str,
        target: str,
        translator: Translator,
        engine: Engine,
        inspector: Inspector,
        split: Splitter | None,
    ):
        self.source, self.target, self.translator = source, target, translator
        self.engine, self.inspector = engine, inspector
        self.split: Splitter = split or (lambda line: [line])

    def close(self) -> None:
        """Translate what has been taken, and end the threads."""
        self.engine.close()
        self.inspector.close()

    async def translate(self, texts: Sequence[str], *, html: bool = False, n_best: int = 1) -> list[list[str]]:
        """Translate texts, all of whose sentences wait together.

        Args:
            texts: with line feeds, blank lines and list marks, which stay.
            html: whether they are HTML, whose tags stay.
            n_best: translations of each, at most `engine.num_beams`; an HTML text has one.

        Returns:
            For each text so many translations, the best first.

        Raises:
            UserError: a sentence that is longer than the learned positions of the model.
            TooLong: more sentences than the queue holds. QueueFull: more than it holds now.
        """
        documents: list[list[str | Passage]] = []
        if html:  # in the other thread: Python's parser takes seconds for some malformed text
            documents = await self.inspector.run(list, map(split_html, texts))
            found = [
                _Text(split_text(piece.text, self.split), piece)
                for pieces in documents
                for piece in pieces
                if isinstance(piece, Passage)
            ]
        else:
            found = [_Text(split_text(text, self.split)) for text in texts]
        sources = [self._encode(sentence) for text in found for sentence in sentences_of(text.parts)]
        if len(sources) > self.engine.max_queue:
            raise TooLong(f"q: {len(sources)} sentences; at most {self.engine.max_queue} are taken at a time")
        futures = self.engine.submit(sources, n_best)
        # cancelled together with this coroutine, when the time is up or the client has left
        hypotheses = await asyncio.gather(*map(asyncio.wrap_future, futures))
        if not html:
            return self._as_text(found, hypotheses, n_best)
        passages = iter(await self._as_html(found, sources, hypotheses))
        return [
            [join_html(pieces, [next(passages) for piece in pieces if isinstance(piece, Passage)])]
            for pieces in documents
        ]

    def _encode(self, sentence: str) -> list[int]:
        try:
            ids = self.translator.encode(sentence, 1)
        except UserError as error:
            raise UserError("q: " + str(error).removeprefix("line 1: ").replace("the line", "the sentence")) from error
        if len(ids) > MAX_SENTENCE_TOKENS:
            raise TooLong(f"q: a sentence of {len(ids)} tokens; at most {MAX_SENTENCE_TOKENS} are taken; split it")
        return ids

    def _decode(self, hypothesis: FoundHypothesis) -> str:
        text = self.translator.target_tokenizer.decode(
            hypothesis.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text.replace("\n", " ")  # a model can generate any character

    def _as_text(
        self, texts: Sequence[_Text], hypotheses: Sequence[list[FoundHypothesis]], n_best: int
    ) -> list[list[str]]:
        """The n-th translation of a text has the n-th of each sentence, or its last."""
        following, results = iter(hypotheses), []
        for text in texts:
            own = [next(following) for _ in sentences_of(text.parts)]
            count = max([1, *(min(n_best, len(each)) for each in own)])
            by_rank = [[self._decode(each[min(rank, len(each) - 1)]) for each in own] for rank in range(count)]
            results.append([join_text(text.parts, translations) for translations in by_rank])
        return results

    async def _as_html(
        self, passages: Sequence[_Text], sources: Sequence[list[int]], hypotheses: Sequence[list[FoundHypothesis]]
    ) -> list[str]:
        """HTML of each passage; words are aligned only where there are inline elements."""
        number, pairs, owners = 0, [], []
        for text in passages:
            for _ in sentences_of(text.parts):
                if text.passage is not None and text.passage.elements:
                    pairs.append((sources[number], hypotheses[number][0].tokens))
                    owners.append(number)
                number += 1
        links: dict[int, list[Link]] = {}
        if pairs:
            found = await self.inspector.run(self.inspector.align, *map(list, zip(*pairs, strict=True)))
            links = dict(zip(owners, found, strict=True))
        number, results = 0, list[tuple[Passage, list[TranslatedPart]]]()
        for text in passages:
            parts = []
            for part in text.parts:
                if not part.is_sentence:
                    parts.append(TranslatedPart(part.text, part.text))
                    continue
                translation = self._decode(hypotheses[number][0])
                parts.append(TranslatedPart(part.text, translation, links.get(number, [])))
                number += 1
            assert text.passage is not None
            results.append((text.passage, parts))
        return await self.inspector.run(lambda: [passage.html(parts) for passage, parts in results])
