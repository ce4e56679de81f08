"""One language pair: from the texts of a request to their translations. Runs in the thread of the requests."""

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

Result = TypeVar("Result")

#: For each sentence of a text, its token ids and its hypotheses, the best first.
Translated = list[tuple[list[int], list[FoundHypothesis]]]


class TooLong(UserError):
    """A request that is larger than the server takes."""


class LanguagePair:
    """Translates texts from one language into another.

    Args:
        source, target: codes such as "en".
        translator: its tokenizers are used here and nowhere else.
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
        # Python's HTML parser takes seconds for some malformed documents
        self._html_thread = ThreadPoolExecutor(1, thread_name_prefix="html")

    def close(self) -> None:
        """Translate the sentences in the queue, then end the threads."""
        self.engine.close()
        self.inspector.close()
        self._html_thread.shutdown()

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
        parts = [split_text(text, self.split, self.source) for text in texts]
        results = []
        for of_text, translated in zip(parts, await self._search(parts, n_best), strict=True):
            hypotheses = [[self._decode(hypothesis) for hypothesis in ranked] for _, ranked in translated]
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
        documents = await self._in_html_thread(lambda: [split_html(text) for text in texts])
        passages = [piece for pieces in documents for piece in pieces if isinstance(piece, Passage)]
        parts = [split_text(passage.text, self.split, self.source) for passage in passages]
        translated = await self._search(parts, 1)
        links = await self._links(passages, translated)
        sentences = [
            self._sentences(*of_passage, links) for of_passage in zip(passages, parts, translated, strict=True)
        ]

        def joined() -> list[list[str]]:
            following = (passage.html(own) for passage, own in zip(passages, sentences, strict=True))
            return [[join_html(pieces, following)] for pieces in documents]

        return await self._in_html_thread(joined)

    def _sentences(
        self, passage: Passage, parts: list[Part], translated: Translated, links: Iterator[list[Link]]
    ) -> list[TranslatedPart]:
        following = iter(translated)
        results = []
        for part in parts:
            if part.is_sentence:
                translation = self._decode(next(following)[1][0])
                results.append(TranslatedPart(part.text, translation, next(links) if passage.elements else []))
            else:
                results.append(TranslatedPart(part.text, part.text))
        return results

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
        sources = [[self._encode(sentence) for sentence in sentences_of(parts)] for parts in texts]
        count = sum(map(len, sources))
        if count > self.engine.max_queue:
            raise TooLong(f"q: {count} sentences, but the limit is {self.engine.max_queue}")
        futures = self.engine.submit([source for of_text in sources for source in of_text], n_best)
        # cancelled with this coroutine, when the time is up or the client has disconnected
        following = iter(await asyncio.gather(*map(asyncio.wrap_future, futures)))
        return [[(source, next(following)) for source in of_text] for of_text in sources]

    def _encode(self, sentence: str) -> list[int]:
        try:
            ids = self.translator.encode(sentence, 1)
        except UserError as error:
            raise UserError("q: " + str(error).removeprefix("line 1: ").replace("the line", "the sentence")) from error
        if len(ids) > MAX_SENTENCE_TOKENS:
            raise TooLong(f"q: a sentence of {len(ids)} tokens, but the limit is {MAX_SENTENCE_TOKENS}: split it")
        return ids

    def _decode(self, hypothesis: FoundHypothesis) -> str:
        text = self.translator.target_tokenizer.decode(
            hypothesis.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text.replace("\n", " ")  # a model can generate any character

    async def _in_html_thread(self, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._html_thread, function)
