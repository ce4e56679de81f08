"""One language pair: from the texts of a request to their translations.

Splitting, tokenizing and decoding run in one thread per pair, some items of a request at a time. The event loop stays
free, and a small request does not wait for all of a large one.
"""

import asyncio
import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, islice
from textwrap import shorten
from typing import Any, TypeVar

from ..documents.documents import (
    Part,
    SentenceCutter,
    Splitter,
    join_text,
    sentences_of,
    split_text,
    translated_parts,
)
from ..documents.html_text import split_html
from ..documents.passages import join_pieces, passages_of
from ..engine.continuous import FoundHypothesis
from ..inference.alignment import Link
from ..inference.line_warnings import LineWarnings
from ..inference.placement import TranslatedPart
from ..inference.protected import Protected, protect
from ..inference.translator import ENDLESS, Translator
from ..text.side_tokens import AS_TEXT
from ..utils.errors import UserError
from .engine import Engine
from .inspection import Inspector
from .schemas import PageRequest

#: Attention needs memory for the square of a sentence's length. Models are trained on far shorter ones.
MAX_SENTENCE_TOKENS = 1024

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Lines or sentences of a request that the text thread works on before the next request has its turn.
_ITEMS_AT_ONCE = 32

_SHOWN_CHARACTERS = 60  # of a sentence in a warning

#: For each sentence of a text its translations, the best first, with the links of `text.words` if needed.
Translated = list[list[tuple[str, list[Link]]]]

#: For each sentence its protected spans, and the token ids of the rest.
Prepared = dict[str, tuple[Protected | None, list[int]]]


class TooLong(UserError):
    """A request that is larger than the server takes."""


class LanguagePair:
    """Translates texts from one language into another.

    `item` names what an input consists of, for messages.

    Args:
        source, target: codes such as "en".
        translator: of this direction. Its tokenizers are used in this object's thread and nowhere else.
        split: splits a line into sentences. None takes a line as one sentence.
        site: content of `site.json`, as web/README.md describes it, without the settings of the search.
        engine: arguments of `Engine`.
    """

    item = "sentence"

    def __init__(
        self,
        source: str,
        target: str,
        translator: Translator,
        split: Splitter | None = None,
        site: Mapping[str, object] | None = None,
        **engine: Any,
    ):
        self.source = source
        self.target = target
        self.name = f"{source}-{target}"
        self.translator = translator
        self.split: Splitter = split or (lambda line: [line])
        self.engine = Engine(translator, **engine)
        # a limit that somebody set is no surprise
        self._limited = bool(
            engine.get("max_new_tokens") or translator.model.generation_config.max_new_tokens
        )
        self.site = site or {}
        self.inspector = Inspector(translator)
        self._text_thread = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._html_thread = ThreadPoolExecutor(1, thread_name_prefix="html")

    def directed(
        self, source: str, target: str, split: Splitter | None, site: Mapping[str, object]
    ) -> "LanguagePair":
        """Another direction of a model of many languages. One engine translates both, in the same batches."""
        other = copy.copy(self)
        other.source = source
        other.target = target
        other.name = f"{source}-{target}"
        other.translator = self.translator.directed(source, target)
        other.split = split or (lambda line: [line])
        other.site = site
        return other

    @property
    def mark(self) -> list[int]:
        """The first ids of a translation."""
        directions = self.translator.directions
        return directions.prefix(directions.default)

    def close(self) -> None:
        """Translate the sentences in the queue, then end the threads."""
        self.engine.close()
        self.inspector.close()
        self._text_thread.shutdown()
        self._html_thread.shutdown()

    async def translate(
        self, texts: Sequence[str], warnings: list[str], *, html: bool = False, n_best: int = 1
    ) -> list[list[str]]:
        """Translate texts. All their sentences wait in the queue together.

        Args:
            texts: their line feeds, blank lines and list marks stay.
            warnings: receives a line for each sentence that was cut, one for translations that did not end, and one
                for unknown symbols.
            html: the texts are HTML, and their tags stay.
            n_best: translations of each text, at most `engine.num_beams`. An HTML text has one.

        Returns:
            For each text its different translations, the best first.

        Raises:
            UserError: a sentence is longer than the learned positions of the model.
            TooLong: the sentences never fit into the queue.
            QueueFull: the sentences do not fit into the queue at present.
        """
        if html:
            return await self._translate_html(texts, warnings)
        parts, prepared = await self._split(texts, warnings)
        found = await self._search(parts, prepared, warnings, n_best=n_best)
        return await self._map(self._ranked, list(zip(parts, found, strict=True)))

    def _ranked(self, text: tuple[list[Part], Translated]) -> list[str]:
        """The translations of a text. A sentence with fewer hypotheses repeats its last one."""
        parts, sentences = text
        joined = []
        for rank in range(max(map(len, sentences), default=1)):
            texts = [hypotheses[: rank + 1][-1][0] for hypotheses in sentences]
            joined.append(join_text(parts, texts, self.source, self.target))
        return list(dict.fromkeys(joined))

    async def _translate_html(self, texts: Sequence[str], warnings: list[str]) -> list[list[str]]:
        documents = await self._map(split_html, texts, self._html_thread)
        passages = passages_of(documents)
        linked = {number for number, passage in enumerate(passages) if passage.elements}
        sources = [passage.text for passage in passages]
        filled = await self.translate_aligned(sources, warnings, linked)
        join = partial(join_pieces, translated=iter(filled))
        return [[text] for text in await self._map(join, documents, self._html_thread)]

    async def translate_aligned(
        self, texts: Sequence[str], warnings: list[str], linked: Collection[int]
    ) -> list[list[TranslatedPart]]:
        """The parts of each text with their translations.

        Args:
            linked: the numbers of the texts whose words are linked with those of their translations.
        """
        parts, prepared = await self._split(texts, warnings)
        found = await self._search(parts, prepared, warnings, linked)
        return await self._map(self._filled, list(zip(parts, found, strict=True)))

    def _filled(self, text: tuple[list[Part], Translated]) -> list[TranslatedPart]:
        """The parts of a text with its best translation."""
        parts, sentences = text
        best = (hypotheses[0] for hypotheses in sentences)
        return translated_parts(parts, best, self.source, self.target)

    async def page_translation(self, request: PageRequest) -> dict[str, Any]:
        """A `Translation` of the page, as web/README.md defines it: all sentences, and a picture of one.

        The picture is of the sentence at position `caret`, None for the end.
        """
        warnings = list[str]()
        (parts,), prepared = await self._split([request.text], warnings)
        sentences = sentences_of(parts)
        number = _sentence_at(parts, request.caret)
        sentence = "" if number is None else sentences[number]
        protected = prepared[sentence][0] if sentence else None
        beams = request.num_beams or self.engine.num_beams
        text = protected.text if protected else sentence
        picture = await self.inspector.run(
            self.inspector.picture, self.translator, text, beams, request
        )
        shown = number if picture["tokens"] else None
        others = [Part(text, True) for n, text in enumerate(sentences) if n != shown]
        (translated,) = await self._search([others], prepared, warnings)
        if shown is not None:
            translated.insert(shown, [(await self._restored(picture, protected), [])])
        pairs = [
            {
                "source": part.source,
                "target": part.target,
                "is_sentence": part.links is not None,
            }
            for part in self._filled((parts, translated))
        ]
        places = [place for place, pair in enumerate(pairs) if pair["is_sentence"]]
        remarks = [picture["note"]] if "note" in picture else []
        if lines := [*remarks, *dict.fromkeys(warnings)]:
            picture["note"] = "\n".join(lines)
        return picture | {
            "parts": pairs,
            "sentence": None if number is None else places[number],
        }

    async def _restored(self, picture: Mapping[str, Any], protected: Protected | None) -> str:
        """The text of a picture, with the protected spans of its sentence."""
        text: str = picture["text"]
        if protected is None:
            return text
        source, target = ([token["id"] for token in picture[side]] for side in ("source", "tokens"))
        (links,) = await self._align([source], [target])
        return protected.restore(text, links)[0]

    async def _split(
        self, texts: Sequence[str], warnings: list[str]
    ) -> tuple[list[list[Part]], Prepared]:
        """The sentences and the layout of each text, and the sentences as the engine takes them.

        One call in the text thread does both, because each call costs as much as a short sentence.
        """
        cut = SentenceCutter(self.translator)
        prepared = Prepared()
        of_lines = LineWarnings()

        def split(numbered: tuple[int, str]) -> list[Part]:
            number, line = numbered
            parts = split_text(line, self.split, self.source, cut)
            for sentence in sentences_of(parts):
                protected = protect(sentence, self.translator.escaped)
                text = sentence if protected is None else protected.text
                ids = self._encode(text, number, of_lines)
                prepared[sentence] = protected, ids
            return parts

        lines = [text.splitlines(keepends=True) or [""] for text in texts]
        numbered = list(enumerate(chain.from_iterable(lines), start=1))
        following = iter(await self._map(split, numbered))
        parts = [list(chain.from_iterable(islice(following, len(each)))) for each in lines]
        warnings += of_lines.warnings()
        warnings += [
            f"a sentence of {tokens} tokens is longer than any in training: cut"
            for tokens in cut.lengths
        ]
        return parts, prepared

    async def _search(
        self,
        texts: list[list[Part]],
        prepared: Prepared,
        warnings: list[str],
        linked: Collection[int] = (),
        n_best: int = 1,
    ) -> list[Translated]:
        """Translate the sentences of texts, as `_split` has prepared them.

        The words of the texts with the numbers `linked` are linked, and those of sentences with protected spans.
        """
        rows = [(n, sentence) for n, parts in enumerate(texts) for sentence in sentences_of(parts)]
        sentences = [sentence for _, sentence in rows]
        spans = [prepared[sentence][0] for sentence in sentences]
        sources = [prepared[sentence][1] for sentence in sentences]
        hypotheses = await self._hypotheses(sentences, sources, n_best, warnings)
        needed = [row for row, (text, _) in enumerate(rows) if spans[row] or text in linked]
        targets = [one.tokens for row in needed for one in hypotheses[row]]
        repeated = [sources[row] for row in needed for _ in hypotheses[row]]
        links = iter(await self._align(repeated, targets))
        links_of = {row: list(islice(links, len(hypotheses[row]))) for row in needed}

        def restored(row: int) -> list[tuple[str, list[Link]]]:
            protected = spans[row]
            decoded = self._decode_all(hypotheses[row])
            pairs = list(zip(decoded, links_of.get(row, [[]] * len(decoded)), strict=True))
            return pairs if protected is None else [protected.restore(*pair) for pair in pairs]

        following = iter(await self._map(restored, range(len(rows))))
        return [list(islice(following, len(sentences_of(parts)))) for parts in texts]

    async def _hypotheses(
        self,
        texts: Sequence[str],
        sources: Sequence[list[int]],
        n_best: int,
        warnings: list[str],
    ) -> list[list[FoundHypothesis]]:
        """Search for translations of encoded texts, with a warning of best ones that have no end token."""
        if len(texts) > self.engine.max_queue:
            raise TooLong(f"q: {len(texts)} {self.item}s, but the limit is {self.engine.max_queue}")
        futures = self.engine.submit(sources, n_best, self.mark)
        # cancelled with this coroutine, when the time is up or the client has disconnected
        found = await asyncio.gather(*map(asyncio.wrap_future, futures))
        if not self._limited:
            ends = self.translator.end_tokens
            endless = [
                shorten(text, _SHOWN_CHARACTERS)
                for text, hypotheses in zip(texts, found, strict=True)
                if not ends.intersection(hypotheses[0].tokens[-1:])
            ]
            if endless:
                others = f" and {len(endless) - 1:,} more {self.item}s" if endless[1:] else ""
                warnings.append(f"{ENDLESS[self.translator.task]}: {endless[0]}{others}")
        return found

    async def _align(
        self, sources: Sequence[list[int]], targets: Sequence[list[int]]
    ) -> list[list[Link]]:
        """The links of the words of each pair. Other requests have their turn between some pairs."""
        links = list[list[Link]]()
        for start in range(0, len(sources), _ITEMS_AT_ONCE):
            rows = slice(start, start + _ITEMS_AT_ONCE)
            links += await self.inspector.run(self.inspector.align, sources[rows], targets[rows])
        return links

    def _encode(self, sentence: str, number: int, warnings: LineWarnings) -> list[int]:
        try:
            ids = self.translator.encode(sentence, number, warnings=warnings)
        except UserError as error:
            message = str(error).removeprefix(f"line {number}: ")
            raise UserError("q: " + message.replace("the line", f"the {self.item}")) from error
        if len(ids) > MAX_SENTENCE_TOKENS:
            raise TooLong(
                f"q: a {self.item} of {len(ids)} tokens, but the limit is {MAX_SENTENCE_TOKENS}: split it"
            )
        return ids

    def _decode_all(self, hypotheses: Sequence[FoundHypothesis]) -> list[str]:
        rows = [hypothesis.tokens[len(self.mark) :] for hypothesis in hypotheses]
        texts = self.translator.target_tokenizer.batch_decode(rows, **AS_TEXT)
        return [text.replace("\n", " ") for text in texts]  # a model can generate any character

    async def _map(
        self,
        function: Callable[[Item], Result],
        items: Sequence[Item],
        thread: ThreadPoolExecutor | None = None,
    ) -> list[Result]:
        """Apply a function to each item, in the text thread or another one."""
        loop = asyncio.get_running_loop()
        results = list[Result]()
        for start in range(0, len(items), _ITEMS_AT_ONCE):
            own = map(function, items[start : start + _ITEMS_AT_ONCE])
            results += await loop.run_in_executor(thread or self._text_thread, list, own)
        return results


def _sentence_at(parts: Sequence[Part], caret: int | None) -> int | None:
    """The number of the sentence at a position of the text, or of the last one. None without a sentence.

    A position before the first sentence belongs to that.
    """
    found = -1
    start = 0
    for part in parts:
        if part.is_sentence and (found < 0 or caret is None or start <= caret):
            found += 1
        start += len(part.text)
    return None if found < 0 else found
