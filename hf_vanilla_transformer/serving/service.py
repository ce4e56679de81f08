"""One language pair: from the texts of a request to their translations.

Splitting, tokenizing and decoding run in one thread per pair, some items of a request at a time. The event loop stays
free, and a small request does not wait for all of a large one.
"""

import asyncio
import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from textwrap import shorten
from typing import Any, TypeVar

from ..data.side_tokens import AS_TEXT
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
from ..inference.placement import TranslatedPart
from ..inference.protected import Protected, protect
from ..inference.translator import ENDLESS, Translator
from ..inference.unknown import UnknownSymbols
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

#: For each sentence of a text its translations, the best first, with the links of `data.words` if needed.
Translated = list[list[tuple[str, list[Link]]]]

#: For each sentence its protected spans, and the token ids of the rest.
Prepared = dict[str, tuple[Protected | None, list[int]]]


@dataclass
class Notes:
    """Facts about translations, in addition to their texts."""

    #: For each sentence the tokens of its translation, as `Inspector.token_probabilities` returns them.
    probabilities: list[list[dict[str, object]]] | None = None
    #: for each text the number of its sentences
    sentences: list[int] = field(default_factory=list)
    #: sentences that were cut, and translations without an end
    warnings: list[str] = field(default_factory=list)

    def by_text(self) -> list[list[list[dict[str, object]]]]:
        """The probabilities of each text."""
        following = iter(self.probabilities or [])
        return [list(islice(following, count)) for count in self.sentences]


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
        other.inspector = self.inspector.directed(other.translator)
        return other

    def close(self) -> None:
        """Translate the sentences in the queue, then end the threads."""
        self.engine.close()
        self.inspector.close()
        self._text_thread.shutdown()
        self._html_thread.shutdown()

    async def translate(
        self, texts: Sequence[str], notes: Notes, *, html: bool = False, n_best: int = 1
    ) -> list[list[str]]:
        """Translate texts. All their sentences wait in the queue together.

        Args:
            texts: their line feeds, blank lines and list marks stay.
            notes: receives the warnings and, if it has a list for them, the probabilities.
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
            return await self._translate_html(texts, notes)
        parts, prepared = await self._split(texts, notes)
        found = await self._search(parts, prepared, notes, n_best=n_best)
        return await self._map(self._ranked, list(zip(parts, found, strict=True)))

    def _ranked(self, text: tuple[list[Part], Translated]) -> list[str]:
        """The translations of a text. A sentence with fewer hypotheses repeats its last one."""
        parts, sentences = text
        joined = []
        for rank in range(max(map(len, sentences), default=1)):
            texts = [hypotheses[: rank + 1][-1][0] for hypotheses in sentences]
            joined.append(join_text(parts, texts, self.source, self.target))
        return list(dict.fromkeys(joined))

    async def _translate_html(self, texts: Sequence[str], notes: Notes) -> list[list[str]]:
        documents = await self._map(split_html, texts, self._html_thread)
        passages = passages_of(documents)
        linked = {number for number, passage in enumerate(passages) if passage.elements}
        sources = [passage.text for passage in passages]
        filled = await self.translate_aligned(sources, notes, linked)
        counts = iter(notes.sentences)
        passages_each = [len(passages_of([document])) for document in documents]
        notes.sentences = [sum(islice(counts, number)) for number in passages_each]
        join = partial(join_pieces, translated=iter(filled))
        return [[text] for text in await self._map(join, documents, self._html_thread)]

    async def translate_aligned(
        self, texts: Sequence[str], notes: Notes, linked: Collection[int]
    ) -> list[list[TranslatedPart]]:
        """The parts of each text with their translations.

        Args:
            linked: the numbers of the texts whose words are linked with those of their translations.
        """
        parts, prepared = await self._split(texts, notes)
        found = await self._search(parts, prepared, notes, linked)
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
        notes = Notes()
        (parts,), prepared = await self._split([request.text], notes)
        sentences = sentences_of(parts)
        number = _sentence_at(parts, request.caret)
        sentence = "" if number is None else sentences[number]
        protected = prepared[sentence][0] if sentence else None
        beams = request.num_beams or self.engine.num_beams
        picture = await self.inspector.run(
            self.inspector.picture, protected.text if protected else sentence, beams, request
        )
        shown = number if picture["tokens"] else None
        others = [Part(text, True) for n, text in enumerate(sentences) if n != shown]
        (translated,) = await self._search([others], prepared, notes)
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
        if lines := [*remarks, *dict.fromkeys(notes.warnings)]:
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
        (links,) = await self.inspector.run(self.inspector.align, [source], [target])
        return protected.restore(text, links)[0]

    async def _split(self, texts: Sequence[str], notes: Notes) -> tuple[list[list[Part]], Prepared]:
        """The sentences and the layout of each text, and the sentences as the engine takes them.

        One call in the text thread does both, because each call costs as much as a short sentence.
        """
        cut = SentenceCutter(self.translator)
        prepared = Prepared()
        unknown = UnknownSymbols()
        tokenizer = self.translator.source_tokenizer

        def split(line: tuple[int, str]) -> list[Part]:
            parts = split_text(line[1], self.split, self.source, cut)
            for sentence in sentences_of(parts):
                protected = protect(sentence, self.translator.escaped)
                text = sentence if protected is None else protected.text
                ids = self._encode(text)
                unknown.check("source", tokenizer, text, ids, line[0] + 1)
                prepared[sentence] = protected, ids
            return parts

        lines = [
            (number, line)
            for number, text in enumerate(texts)
            for line in text.splitlines(keepends=True)
        ]
        parts: list[list[Part]] = [[] for _ in texts]
        for (number, _), of_line in zip(lines, await self._map(split, lines), strict=True):
            parts[number] += of_line
        notes.warnings += unknown.warnings()
        for tokens in cut.lengths:
            notes.warnings.append(
                f"a sentence of {tokens} tokens is longer than any in training: cut"
            )
        return parts, prepared

    async def _search(
        self,
        texts: list[list[Part]],
        prepared: Prepared,
        notes: Notes,
        linked: Collection[int] = (),
        n_best: int = 1,
    ) -> list[Translated]:
        """Translate the sentences of texts, as `_split` has prepared them.

        The words of the texts with the numbers `linked` are linked, and those of sentences with protected spans.
        """
        rows = [(n, sentence) for n, parts in enumerate(texts) for sentence in sentences_of(parts)]
        self.check_queue(len(rows))
        sentences = [sentence for _, sentence in rows]
        spans = [prepared[sentence][0] for sentence in sentences]
        sources = [prepared[sentence][1] for sentence in sentences]
        futures = self.engine.submit(sources, n_best, self.inspector.mark)
        # cancelled with this coroutine, when the time is up or the client has disconnected
        hypotheses = await asyncio.gather(*map(asyncio.wrap_future, futures))
        self._note_unended(sentences, hypotheses, notes)
        if notes.probabilities is not None:
            best = [ranked[0].tokens for ranked in hypotheses]
            notes.probabilities += await self._inspect(
                self.inspector.token_probabilities, sources, best
            )
        needed = [row for row, (text, _) in enumerate(rows) if spans[row] or text in linked]
        links_of = await self._links(needed, sources, hypotheses)

        def restored(row: int) -> list[tuple[str, list[Link]]]:
            protected = spans[row]
            decoded = self._decode_all(hypotheses[row])
            pairs = list(zip(decoded, links_of.get(row, [[]] * len(decoded)), strict=True))
            return pairs if protected is None else [protected.restore(*pair) for pair in pairs]

        following = iter(await self._map(restored, range(len(rows))))
        notes.sentences = [len(sentences_of(parts)) for parts in texts]
        return [list(islice(following, count)) for count in notes.sentences]

    async def _links(
        self,
        numbers: Sequence[int],
        sources: Sequence[list[int]],
        hypotheses: Sequence[list[FoundHypothesis]],
    ) -> dict[int, list[list[Link]]]:
        """The links of the words of each hypothesis, for the sentences with these numbers."""
        targets = [one.tokens for number in numbers for one in hypotheses[number]]
        repeated = [sources[number] for number in numbers for _ in hypotheses[number]]
        found = iter(await self._inspect(self.inspector.align, repeated, targets))
        return {number: list(islice(found, len(hypotheses[number]))) for number in numbers}

    async def _inspect(
        self,
        function: Callable[..., list[Result]],
        sources: Sequence[list[int]],
        targets: Sequence[list[int]],
    ) -> list[Result]:
        """Call a method of the inspector for some pairs at a time. Other requests have their turn between them."""
        results = list[Result]()
        for start in range(0, len(sources), _ITEMS_AT_ONCE):
            end = start + _ITEMS_AT_ONCE
            results += await self.inspector.run(function, sources[start:end], targets[start:end])
        return results

    def check_queue(self, count: int) -> None:
        """Refuse more sentences than ever fit into the queue."""
        if count > self.engine.max_queue:
            raise TooLong(f"q: {count} {self.item}s, but the limit is {self.engine.max_queue}")

    def _note_unended(
        self, texts: Sequence[str], hypotheses: Sequence[list[FoundHypothesis]], notes: Notes
    ) -> None:
        """Warn of best hypotheses without an end token."""
        if self._limited:
            return
        ends = self.translator.end_tokens
        for text, ranked in zip(texts, hypotheses, strict=True):
            if not ends.intersection(ranked[0].tokens[-1:]):
                notes.warnings.append(f"{ENDLESS}: {shorten(text, _SHOWN_CHARACTERS)}")

    def _encode(self, sentence: str) -> list[int]:
        try:
            ids = self.translator.encode(sentence, 1)
        except UserError as error:
            raise UserError(
                "q: " + str(error).removeprefix("line 1: ").replace("the line", f"the {self.item}")
            ) from error
        if len(ids) > MAX_SENTENCE_TOKENS:
            raise TooLong(
                f"q: a {self.item} of {len(ids)} tokens, but the limit is {MAX_SENTENCE_TOKENS}: split it"
            )
        return ids

    def _decode_all(self, hypotheses: Sequence[FoundHypothesis]) -> list[str]:
        rows = [hypothesis.tokens[len(self.inspector.mark) :] for hypothesis in hypotheses]
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
