"""One language pair: from the texts of a request to their translations.

Splitting, tokenizing and decoding run in one thread per pair, some items of a request at a time. The event loop stays
free, and a small request does not wait for all of a large one.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

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

Item, Result = TypeVar("Item"), TypeVar("Result")

#: Lines or sentences of a request that the text thread works on before those of the next request.
_ITEMS_AT_ONCE = 32

#: For each sentence of a text, its token ids and its hypotheses, the best first.
Translated = list[tuple[list[int], list[FoundHypothesis]]]


class TooLong(UserError):
    """A request that is larger than the server takes."""


class LanguagePair:
    """Translates texts from one language into another.

    Args:
        source, target: codes such as "en".
        translator: its tokenizers are used in this object's thread and nowhere else.
        split: splits a line into sentences. None takes a line as one sentence.
        site: content of `site.json`, as web/README.md describes it.
        engine: arguments of `Engine`.
    """

    def __init__(
        self,
        source: str,
        target: str,
        translator: Translator,
        split: Splitter | None = None,
        site: Mapping[str, Any] | None = None,
        **engine: Any,
    ):
        self.source = source
        self.target = target
        self.name = f"{source}-{target}"
        self.translator = translator
        self.split: Splitter = split or (lambda line: [line])
        self.site = dict(site or {})
        self.engine = Engine(translator, **engine)
        self.inspector = Inspector(translator)
        self._text_thread = ThreadPoolExecutor(1, thread_name_prefix="text")

    def close(self) -> None:
        """Translate the sentences in the queue, then end the threads."""
        self.engine.close()
        self.inspector.close()
        self._text_thread.shutdown()

    async def translate(self, texts: Sequence[str], *, html: bool = False, n_best: int = 1) -> list[list[str]]:
        """Translate texts. All their sentences wait in the queue together.

        Args:
            texts: their line feeds, blank lines and list marks stay.
            html: the texts are HTML, and their tags stay.
            n_best: translations of each text, at most `engine.num_beams`. An HTML text has one.

        Returns:
            For each text its translations, the best first.

        Raises:
            UserError: a sentence is longer than the learned positions of the model.
            TooLong: the sentences never fit into the queue.
            QueueFull: the sentences do not fit into the queue at present.
        """
        if html:
            return await self._translate_html(texts)
        parts = await self._split(texts)
        translated = await self._search(parts, n_best)
        decoded = await self._map(self._decode_all, [ranked for of_text in translated for _, ranked in of_text])
        following = iter(decoded)
        results = []
        for of_text in parts:
            hypotheses = [next(following) for _ in sentences_of(of_text)]
            ranks = range(max(map(len, hypotheses), default=1))
            # a sentence with fewer hypotheses repeats its last one
            results.append(
                [
                    join_text(of_text, [ranked[: rank + 1][-1] for ranked in hypotheses], self.source, self.target)
                    for rank in ranks
                ]
            )
        return results

    async def _translate_html(self, texts: Sequence[str]) -> list[list[str]]:
        documents = await self._map(split_html, texts, at_once=1)
        passages = [piece for pieces in documents for piece in pieces if isinstance(piece, Passage)]
        parts = await self._split([passage.text for passage in passages])
        translated = await self._search(parts, 1)
        links = await self._links(passages, translated)
        decoded = await self._map(self._decode_all, [ranked[:1] for of_text in translated for _, ranked in of_text])
        texts_of_sentences = (texts[0] for texts in decoded)

        def joined(passage_and_parts: tuple[Passage, list[Part]]) -> str:
            passage, own = passage_and_parts
            return passage.html(
                [
                    TranslatedPart(part.text, next(texts_of_sentences), next(links) if passage.elements else [])
                    if part.is_sentence
                    else TranslatedPart(part.text, part.text)
                    for part in own
                ]
            )

        following = iter(await self._map(joined, list(zip(passages, parts, strict=True))))
        return [[join_html(pieces, following)] for pieces in documents]

    async def _split(self, texts: Sequence[str]) -> list[list[Part]]:
        """The sentences and the layout of each text."""
        lines = [(number, line) for number, text in enumerate(texts) for line in text.splitlines(keepends=True)]
        parts: list[list[Part]] = [[] for _ in texts]
        split = await self._map(lambda line: split_text(line[1], self.split, self.source), lines)
        for (number, _), of_line in zip(lines, split, strict=True):
            parts[number] += of_line
        return parts

    async def _links(self, passages: list[Passage], translated: list[Translated]) -> Iterator[list[Link]]:
        """The aligned words of each sentence in a passage with inline elements. Only these passages need them."""
        sentences = [
            sentence
            for passage, of_passage in zip(passages, translated, strict=True)
            for sentence in of_passage
            if passage.elements
        ]
        if not sentences:
            return iter(())
        sources, targets = [source for source, _ in sentences], [ranked[0].tokens for _, ranked in sentences]
        return iter(await self.inspector.run(self.inspector.align, sources, targets))

    async def _search(self, texts: list[list[Part]], n_best: int) -> list[Translated]:
        sentences = [sentence for parts in texts for sentence in sentences_of(parts)]
        if len(sentences) > self.engine.max_queue:
            raise TooLong(f"q: {len(sentences)} sentences, but the limit is {self.engine.max_queue}")
        sources = await self._map(self._encode, sentences)
        futures = self.engine.submit(sources, n_best)
        # cancelled with this coroutine, when the time is up or the client has disconnected
        hypotheses = await asyncio.gather(*map(asyncio.wrap_future, futures))
        following = zip(sources, hypotheses, strict=True)
        return [[next(following) for _ in sentences_of(parts)] for parts in texts]

    def _encode(self, sentence: str) -> list[int]:
        try:
            ids = self.translator.encode(sentence, 1)
        except UserError as error:
            raise UserError("q: " + str(error).removeprefix("line 1: ").replace("the line", "the sentence")) from error
        if len(ids) > MAX_SENTENCE_TOKENS:
            raise TooLong(f"q: a sentence of {len(ids)} tokens, but the limit is {MAX_SENTENCE_TOKENS}: split it")
        return ids

    def _decode_all(self, hypotheses: Sequence[FoundHypothesis]) -> list[str]:
        texts = self.translator.target_tokenizer.batch_decode(
            [hypothesis.tokens for hypothesis in hypotheses],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        return [text.replace("\n", " ") for text in texts]  # a model can generate any character

    async def _map(
        self, function: Callable[[Item], Result], items: Sequence[Item], at_once: int = _ITEMS_AT_ONCE
    ) -> list[Result]:
        """Apply a function to each item, in the text thread."""
        loop, results = asyncio.get_running_loop(), list[Result]()
        for start in range(0, len(items), at_once):
            own = items[start : start + at_once]
            results += await loop.run_in_executor(self._text_thread, lambda own=own: [*map(function, own)])
        return results
