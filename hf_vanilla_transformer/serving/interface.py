"""The answers of a server to LibreTranslate's clients and to the page."""

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import PurePath
from typing import Any

from fastapi import HTTPException

from ..documents.document_files import UPLOADS
from ..inference.languages import NAMES
from ..inference.placement import TranslatedPart
from ..text.language_codes import language_match
from ..text.language_detection import detect_languages
from ..utils.errors import shown
from . import schemas
from .document_process import DocumentProcesses, ServerEnds, TranslateInServer, Upload
from .metrics import ServerMetrics
from .options import Limits
from .request_body import UploadedFile
from .sequences import SequenceModel
from .service import LanguagePair

#: A shorter text is not taken for one in the target language.
_SURE_CHARACTERS = 40

_KEPT_FILES = 32  # translated documents
_KEPT_BYTES = 100_000_000  # of them, if there is more than one


class Server:
    """The models of a server, and their answers: language pairs, or one model of sequences.

    With a language as `pivot` two pairs serve a third: de to en and en to fr translate de to fr.
    """

    def __init__(self, pairs: Iterable[LanguagePair], limits: Limits, pivot: str | None = None):
        self.pairs = list(pairs)
        self.routes = {(pair.source, pair.target): [pair] for pair in self.pairs}
        for first, second in product(self.pairs, repeat=2):
            if first.target == second.source == pivot and first.source != second.target:
                self.routes.setdefault((first.source, second.target), [first, second])
        self.limits = limits
        engines = {pair.engine: pair for pair in reversed(self.pairs)}
        self.models = list(engines.values())[::-1]  # the first pair of each model
        self.metrics = ServerMetrics({pair.name: pair.engine for pair in self.models})
        self.documents = DocumentProcesses()
        self.files: dict[str, bytes] = {}  # translated documents, the oldest first
        self.codes = list(
            dict.fromkeys(code for pair in self.pairs for code in (pair.source, pair.target))
        )

    def close(self) -> None:
        """Translate the sentences in the queues, then end the threads."""
        for pair in self.models:
            pair.close()

    async def translate(self, request: schemas.TranslateRequest) -> schemas.TranslateAnswer:
        """Translate the texts of a request. A text in the target language stays as it is."""
        texts = [request.q] if isinstance(request.q, str) else request.q
        self._check_characters("q", sum(map(len, texts)))
        target = self._known(request.target)
        answer: dict[str, Any] = {}
        if request.source == "auto":
            detected = await self._detected(texts, target)
            answer["detectedLanguage"] = detected
            sources = [language.language for language in detected]
        else:
            self._route(request.source, request.target)  # refuses an unknown pair without a text
            sources = [request.source] * len(texts)
        ranked: list[list[str]] = [[]] * len(texts)
        warnings = list[str]()
        for source in dict.fromkeys(sources):
            rows = [row for row, other in enumerate(sources) if other == source]
            route = self._route(source, request.target)
            chosen = [texts[row] for row in rows]
            found = await _translate_along(route, chosen, request, warnings)
            for row, translations in zip(rows, found, strict=True):
                ranked[row] = translations
        answer["translatedText"] = [best for best, *_ in ranked]
        if request.alternatives:
            answer["alternatives"] = [others[: request.alternatives] for _, *others in ranked]
        if isinstance(request.q, str):
            answer = {name: values[0] for name, values in answer.items()}
        if warnings:
            answer["warnings"] = warnings
        return schemas.TranslateAnswer(**answer)

    async def predict(
        self, model: SequenceModel, request: schemas.PredictRequest
    ) -> schemas.PredictAnswer:
        """Predict the targets of the texts of a request."""
        texts = [request.q] if isinstance(request.q, str) else request.q
        self._check_characters("q", sum(map(len, texts)))
        if request.n_best > (beams := model.engine.num_beams):
            raise HTTPException(
                400, f"n_best: at most {beams}, the beams of the server (serve --num_beams)"
            )
        warnings = list[str]()
        lists = await model.predict(texts, request.n_best, warnings)
        unknown = await model.unknown(texts)
        is_one = isinstance(request.q, str)
        answer: dict[str, Any] = {"predictions": lists[0] if is_one else lists}
        if unknown is not None:
            answer["unknown"] = unknown[0] if is_one else unknown
        if warnings:
            answer["warnings"] = warnings
        return schemas.PredictAnswer(**answer)

    def _route(self, source: str, target: str) -> list[LanguagePair]:
        """The pairs to go through for these codes or their variants. Empty if source and target are one language."""
        fits = {
            codes: (language_match(source, codes[0]), language_match(target, codes[1]))
            for codes in self.routes
        }
        fitting = [codes for codes, fit in fits.items() if all(fit)]
        if fitting:
            return self.routes[max(fitting, key=lambda codes: sum(fits[codes]))]
        source = self._known(source)
        target = self._known(target)
        if source == target:
            return []
        names = [f"{NAMES.get(code, code)} ({code})" for code in (target, source)]
        raise HTTPException(
            400, f"{names[0]} is not available as a target language from {names[1]}"
        )

    def _known(self, requested: str) -> str:
        """The code of the server that fits a code best."""
        code = max(self.codes, key=partial(language_match, requested))
        if not language_match(requested, code):
            raise HTTPException(
                400, f"{shown(requested)} is not supported (GET /languages lists the languages)"
            )
        return code

    async def _detected(self, texts: list[str], target: str) -> list[schemas.DetectedLanguage]:
        """The language of each text, among those that can be translated into `target`, and `target` itself.

        Short texts have the language of all texts together.
        """
        sources = list(dict.fromkeys(source for source, other in self.routes if other == target))
        if not sources:
            raise HTTPException(
                400, f"{NAMES.get(target, target)} ({target}) is not available as a target language"
            )
        of_short_texts = None
        detected = []
        for text in texts:
            if len(text) > _SURE_CHARACTERS:
                detected.append((await self._ranked(text, [*sources, target]))[0])
                continue
            if of_short_texts is None:
                of_short_texts = (await self._ranked("\n".join(texts), sources))[0]
            detected.append(of_short_texts)
        return detected

    async def detect(self, request: schemas.DetectRequest) -> list[schemas.DetectedLanguage]:
        """The languages of the server, the most probable for a text first."""
        self._check_characters("q", len(request.q))
        return [
            language
            for language in await self._ranked(request.q, self.codes)
            if language.confidence
        ]

    async def _ranked(self, text: str, codes: list[str]) -> list[schemas.DetectedLanguage]:
        if len(codes) == 1:
            return [schemas.DetectedLanguage(confidence=100.0, language=codes[0])]
        ranked = await asyncio.to_thread(detect_languages, text, codes)
        return [
            schemas.DetectedLanguage(confidence=round(100 * share, 1), language=code)
            for code, share in ranked
        ]

    async def translate_file(self, request: schemas.FileRequest) -> tuple[str, list[str]]:
        """Translate a document, and keep it for some time.

        Returns:
            Its name for `GET /download_file`, and warnings.
        """
        file = request.file
        name = PurePath(file.name).name if isinstance(file, UploadedFile) else ""
        suffix = PurePath(name).suffix
        if suffix.lower() not in UPLOADS:
            raise HTTPException(
                400, f"Invalid request: file format not supported ({', '.join(UPLOADS)})"
            )
        if request.source == "auto":
            target = self._known(request.target)
            is_memory = suffix.lower() == ".tmx"  # which has texts of several languages
            sources = {source for source, other in self.routes if other == target}
            if is_memory and len(sources) > 1:
                raise HTTPException(
                    400, f"source: auto is not supported for {suffix}; give a language code"
                )
            has_text = sources and not is_memory
            text = await self._passages(file.content, suffix, target) if has_text else ""
            (found,) = await self._detected([text], target)
            request = request.model_copy(update={"source": found.language})
        content = file.content
        warnings = list[str]()
        for pair in self._route(request.source, request.target):
            content = await self._translated_file(pair, content, suffix, warnings)
        return self._keep(name, content), warnings

    async def _translated_file(
        self, pair: LanguagePair, content: bytes, suffix: str, warnings: list[str]
    ) -> bytes:
        async def translate(texts: Sequence[str]) -> list[list[TranslatedPart]]:
            return await pair.translate_aligned(texts, warnings, range(len(texts)))

        return await self._through_document(content, suffix, pair.source, pair.target, translate)

    async def _passages(self, content: bytes, suffix: str, target: str) -> str:
        """The text of a document that would be translated, without its scripts, notes and keywords."""
        passages = list[str]()

        async def collect(texts: Sequence[str]) -> list[list[TranslatedPart]]:
            passages.extend(texts)
            return [[TranslatedPart(text, text)] for text in texts]

        await self._through_document(content, suffix, "", target, collect)
        return "\n".join(passages)

    async def _through_document(
        self, content: bytes, suffix: str, source: str, target: str, translate: TranslateInServer
    ) -> bytes:
        upload = Upload(
            content=content,
            suffix=suffix,
            source=source,
            target=target,
            max_characters=self.limits.max_characters,
            seconds=self.limits.timeout,
        )
        try:
            return await self.documents.translate(upload, translate)
        except ServerEnds:
            raise HTTPException(503, "the server is ending: send the file again") from None

    def _keep(self, name: str, content: bytes) -> str:
        """Keep a translated document, and forget the oldest ones."""
        key = f"{secrets.token_urlsafe(16)}.{name}"
        self.files[key] = content
        while len(self.files) > _KEPT_FILES or (
            len(self.files) > 1 and sum(map(len, self.files.values())) > _KEPT_BYTES
        ):
            del self.files[next(iter(self.files))]
        return key

    async def page_translation(
        self, pair: LanguagePair, request: schemas.PageRequest
    ) -> dict[str, Any]:
        self._check_characters("text", len(request.text))
        most = max(16, pair.engine.num_beams)
        if request.num_beams is not None and request.num_beams > most:
            raise HTTPException(400, f"num_beams: at most {most}")
        return await pair.page_translation(request)

    def _check_characters(self, name: str, count: int) -> None:
        most = self.limits.max_characters
        if count > most:
            raise HTTPException(400, f"{name}: request ({count}) exceeds text limit ({most})")

    def languages(self) -> list[schemas.Language]:
        targets: dict[str, list[str]] = {code: [] for code in self.codes}
        for source, target in self.routes:
            targets[source].append(target)
        named = ((code, NAMES.get(code, code), into) for code, into in targets.items())
        return [schemas.Language(code=code, name=name, targets=into) for code, name, into in named]

    def settings(self) -> dict[str, Any]:
        """The settings that LibreTranslate's own page and some clients read."""
        first = self.pairs[0]
        has_key = self.limits.api_key is not None
        return {
            "apiKeys": has_key,
            "charLimit": self.limits.max_characters,
            "filesTranslation": self.limits.translate_files,
            "frontendTimeout": 500,
            "keyRequired": has_key,
            "language": {
                side: {"code": code, "name": NAMES.get(code, code)}
                for side, code in (("source", first.source), ("target", first.target))
            },
            "suggestions": False,
            "supportedFilesFormat": list(UPLOADS) if self.limits.translate_files else [],
        }


async def _translate_along(
    route: Sequence[LanguagePair],
    texts: Sequence[str],
    request: schemas.TranslateRequest,
    warnings: list[str],
) -> list[list[str]]:
    """The translations of texts by the pairs of a route, one after the other."""
    ranked = [[text] for text in texts]
    for pair in route:
        ranked = await pair.translate(
            [best for best, *_ in ranked],
            warnings,
            html=request.format == "html",
            n_best=pair.engine.num_beams if request.alternatives else 1,
        )
    return ranked
