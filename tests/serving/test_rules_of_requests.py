"""Rules of a server without a model: routes, languages, the documents that are kept, limits, and warnings."""

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from fastapi import HTTPException
from starlette.requests import ClientDisconnect

from hf_vanilla_transformer.documents.document_files import translate_document
from hf_vanilla_transformer.documents.documents import Part
from hf_vanilla_transformer.engine.continuous import FoundHypothesis
from hf_vanilla_transformer.inference.placement import TranslatedPart
from hf_vanilla_transformer.serving import app, interface, schemas
from hf_vanilla_transformer.serving.document_process import ServerEnds, Upload
from hf_vanilla_transformer.serving.engine import QueueFull
from hf_vanilla_transformer.serving.interface import Server
from hf_vanilla_transformer.serving.options import Limits
from hf_vanilla_transformer.serving.request_body import UploadedFile
from hf_vanilla_transformer.serving.sequences import SequenceModel, _lines
from hf_vanilla_transformer.serving.service import LanguagePair, TooLong, _sentence_at
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import error_of


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def refusal(call: Callable[..., Any], *arguments: Any) -> str:
    """The status and the message of a refused request."""
    with pytest.raises(HTTPException) as refused:
        made = call(*arguments)
        if asyncio.iscoroutine(made):
            run(made)
    return f"{refused.value.status_code}: {refused.value.detail}"


class FakeEngine:
    """An engine without a model."""

    def __init__(self, num_beams: int = 4) -> None:
        self.num_beams = num_beams


def pair(name: str, engine: Any = None, **more: Any) -> Any:
    """A language pair without a model."""
    source, target = name.split("-", 1)
    engine = engine or FakeEngine()
    return SimpleNamespace(source=source, target=target, name=name, engine=engine, **more)


def server(*pairs: Any, pivot: str | None = None, **limits: Any) -> Server:
    made = [pair(each) if isinstance(each, str) else each for each in pairs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "ServerMetrics", lambda engines: engines)
        return Server(made, Limits(**limits), pivot)


def test_sentence_at_a_position_is_the_last_that_starts_before_it() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        parts = [
            Part("x" * int(rng.integers(1, 4)), bool(rng.integers(2)))
            for _ in range(rng.integers(0, 6))
        ]
        starts = [sum(len(part.text) for part in parts[:place]) for place in range(len(parts))]
        starts = [start for start, part in zip(starts, parts, strict=True) if part.is_sentence]
        for caret in (None, *range(20)):
            before = [
                place for place, start in enumerate(starts) if caret is None or start <= caret
            ]
            expected = max([0, *before]) if starts else None
            assert _sentence_at(parts, caret) == expected


def test_pairs_are_joined_at_the_pivot_alone() -> None:
    languages = ("de", "en", "fr", "it")
    every = list(permutations(languages, 2))
    rng = np.random.default_rng(0)
    for _ in range(60):
        own = [every[place] for place in rng.permutation(len(every))[: rng.integers(1, 7)]]
        for pivot in ("en", "fr", None):
            made = server(*map("-".join, own), pivot=pivot)
            expected = {codes: ["-".join(codes)] for codes in own}
            for source, target in every:
                through = [(source, pivot), (pivot, target)]
                if (source, target) not in own and all(step in own for step in through):
                    expected[source, target] = [
                        f"{source}-{pivot}",
                        f"{pivot}-{target}",
                    ]
            found = {codes: [each.name for each in route] for codes, route in made.routes.items()}
            assert found == expected
            targets = {one.code: set(one.targets) for one in made.languages()}
            assert targets == {
                code: {target for source, target in expected if source == code}
                for code in languages
                if any(code in codes for codes in own)
            }


def test_languages_have_their_names_and_order() -> None:
    made = server("de-en", "en-fr", "en-de", "fr-it", "en-xx", pivot="en")
    assert made.codes == ["de", "en", "fr", "it", "xx"]
    listed = [(one.code, one.name, one.targets) for one in made.languages()]
    assert listed == [
        ("de", "German", ["en", "fr", "xx"]),
        ("en", "English", ["fr", "de", "xx"]),
        ("fr", "French", ["it"]),
        ("it", "Italian", []),
        ("xx", "xx", []),
    ]
    first, second = made._route("de-AT", "fr")
    assert (first.name, second.name) == ("de-en", "en-fr")
    assert made._route("it", "it") == []
    not_available = "400: German (de) is not available as a target language from Italian (it)"
    assert refusal(made._route, "it", "de") == not_available
    assert (
        refusal(made._route, "yy", "de")
        == "400: yy is not supported (GET /languages lists the languages)"
    )


def test_each_model_is_counted_once() -> None:
    closed: list[str] = []
    pairs = [
        pair(name, engine, close=lambda name=name: closed.append(name))
        for name, engine in (
            ("en-de", "a"),
            ("de-en", "a"),
            ("en-fr", "b"),
            ("fr-de", "b"),
            ("fr-en", "c"),
        )
    ]
    made = server(*pairs)
    assert [each.name for each in made.models] == ["en-de", "en-fr", "fr-en"]
    assert made.metrics == {"en-de": "a", "en-fr": "b", "fr-en": "c"}
    made.close()
    assert closed == ["en-de", "en-fr", "fr-en"]


def test_newest_documents_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = server("de-en")

    def kept(*sizes: int) -> list[int]:
        made.files.clear()
        names = [made._keep("x.txt", bytes(size)) for size in sizes]
        assert list(made.files) == names[-len(made.files) :]
        assert names[-1].endswith(".x.txt")
        assert len(names[-1].partition(".")[0]) == 22, "128 bits that nobody guesses"
        return [len(content) for content in made.files.values()]

    half = 50_000_000
    assert kept(half, half) == [half, half]
    assert kept(half, half + 1) == [half + 1]
    assert kept(5, 2 * half, 3) == [3]
    assert kept(5, 2 * half - 3, 3) == [2 * half - 3, 3]
    assert kept(2, 9, 2 * half + 1) == [2 * half + 1]
    assert kept(*range(40)) == list(range(8, 40))
    assert kept(*range(32)) == list(range(32))


def test_texts_have_as_many_characters_as_the_limit() -> None:
    made = server(pair("de-en", translate=None), max_characters=10)
    made._check_characters("q", 10)
    too_long = "400: q: request (11) exceeds text limit (10)"
    assert refusal(made._check_characters, "q", 11) == too_long
    for q in ("x" * 11, ["x" * 5, "x" * 6]):
        request = schemas.TranslateRequest(q=q, source="de", target="en")
        assert refusal(made.translate, request) == too_long
        assert refusal(made.predict, None, schemas.PredictRequest(q=q)) == too_long
    assert refusal(made.detect, schemas.DetectRequest(q="x" * 11)) == too_long
    page = schemas.PageRequest(text="x" * 11)
    assert refusal(made.page_translation, made.pairs[0], page) == too_long.replace("q", "text", 1)


@pytest.mark.parametrize(("beams", "most"), [(1, 16), (4, 16), (16, 16), (17, 17), (50, 50)])
def test_page_has_sixteen_beams_or_those_of_the_server(beams: int, most: int) -> None:
    async def page_translation(request: schemas.PageRequest) -> int | None:
        return request.num_beams

    one = pair("de-en", FakeEngine(beams), page_translation=page_translation)
    made = server(one)
    for asked in (None, 1, most):
        assert (
            run(made.page_translation(one, schemas.PageRequest(text="a", num_beams=asked))) == asked
        )
    message = f"400: num_beams: at most {most}"
    assert (
        refusal(
            made.page_translation,
            one,
            schemas.PageRequest(text="a", num_beams=most + 1),
        )
        == message
    )


def test_settings_are_those_of_libretranslate() -> None:
    made = server("en-xx", "de-en", max_characters=7)
    expected = {
        "apiKeys": False,
        "charLimit": 7,
        "filesTranslation": False,
        "frontendTimeout": 500,
        "keyRequired": False,
        "language": {
            "source": {"code": "en", "name": "English"},
            "target": {"code": "xx", "name": "xx"},
        },
        "suggestions": False,
        "supportedFilesFormat": [],
    }
    assert made.settings() == expected
    settings = server("en-xx", api_key="x", translate_files=True).settings()
    formats = settings["supportedFilesFormat"]
    assert {".txt", ".html", ".docx"} <= set(formats)
    changed = {
        "apiKeys": True,
        "keyRequired": True,
        "filesTranslation": True,
        "charLimit": 10_000,
    }
    assert settings == expected | changed | {"supportedFilesFormat": formats}


def detected_by(shares: dict[str, float]) -> Any:
    """A detection that ranks the languages by these shares, and keeps the texts that it has seen."""

    def detect(text: str, languages: Sequence[str]) -> list[tuple[str, float]]:
        detect.seen.append((text, list(languages)))  # type: ignore[attr-defined]
        return sorted(
            ((code, shares.get(code, 0.0)) for code in languages),
            key=lambda one: -one[1],
        )

    detect.seen = []  # type: ignore[attr-defined]
    return detect


def test_confidences_are_percent_with_one_decimal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = {"de": 0.98764, "en": 0.01196, "fr": 0.0004, "it": 0.0005001}
    monkeypatch.setattr(interface, "detect_languages", detected_by(shares))
    found = run(server("de-en", "fr-it").detect(schemas.DetectRequest(q="x")))
    assert [(one.language, one.confidence) for one in found] == [
        ("de", 98.8),
        ("en", 1.2),
        ("it", 0.1),
    ]


def test_texts_above_forty_characters_are_detected_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    detect = detected_by({"en": 0.5, "fr": 0.25, "de": 1.0})
    monkeypatch.setattr(interface, "detect_languages", detect)
    made = server("en-de", "fr-de", "de-it")
    texts = ["a" * 40, "b" * 41, "c", "d" * 42]
    found = run(made._detected(texts, "de"))
    assert [one.language for one in found] == ["en", "de", "en", "de"]
    assert [one.confidence for one in found] == [50, 100, 50, 100]
    joined = "\n".join(texts)
    own = [(text, ["en", "fr", "de"]) for text in texts if len(text) > 40]
    assert detect.seen == [(joined, ["en", "fr"]), *own]
    only = run(made._detected(["x"], "it"))
    assert [(one.language, one.confidence) for one in only] == [("de", 100.0)]
    assert len(detect.seen) == 3, "a single language is not detected"
    assert (
        refusal(made._detected, ["x"], "fr")
        == "400: French (fr) is not available as a target language"
    )


def upper_pair(name: str, beams: int = 3) -> Any:
    """A pair that translates into capitals and the name of its target, with as many results as asked."""
    asked: list[Any] = []

    async def translate(
        texts: Sequence[str], warnings: list[str], html: bool, n_best: int
    ) -> list[list[str]]:
        asked.append((list(texts), html, n_best))
        warnings.append(f"by {name}")
        return [[f"{text.upper()}{number or ''}" for number in range(n_best)] for text in texts]

    return pair(name, FakeEngine(beams), translate=translate, asked=asked)


def test_texts_are_translated_by_the_pairs_of_their_languages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = upper_pair("en-de")
    second = upper_pair("aa-de")
    made = server(first, second)
    languages = {"a": "en", "b": "aa", "c": "de"}

    async def detected(texts: list[str], target: str) -> list[schemas.DetectedLanguage]:
        return [schemas.DetectedLanguage(language=languages[text], confidence=50) for text in texts]

    monkeypatch.setattr(made, "_detected", detected)
    request = schemas.TranslateRequest(
        q=[*"abcba"], source="auto", target="de", alternatives=1, format="html"
    )
    answer = run(made.translate(request))
    assert answer.translatedText == ["A", "B", "c", "B", "A"]
    assert answer.alternatives == [["A1"], ["B1"], [], ["B1"], ["A1"]]
    detected = [one.language for one in answer.detectedLanguage]
    assert detected == ["en", "aa", "de", "aa", "en"]
    assert answer.warnings == ["by en-de", "by aa-de"]
    assert first.asked == [(["a", "a"], True, 3)]
    assert second.asked == [(["b", "b"], True, 3)]
    answer = run(made.translate(schemas.TranslateRequest(q="b", source="aa", target="de")))
    assert answer.model_dump(exclude_unset=True) == {
        "translatedText": "B",
        "warnings": ["by aa-de"],
    }
    assert second.asked[-1] == (["b"], False, 1)
    answer = run(
        made.translate(schemas.TranslateRequest(q="a", source="en", target="de", alternatives=9))
    )
    assert answer.alternatives == ["A1", "A2"]
    answer = run(made.translate(schemas.TranslateRequest(q=[], source="en", target="de")))
    assert answer.model_dump(exclude_unset=True) == {"translatedText": []}


def test_predictions_are_at_most_the_beams() -> None:
    one = schemas.Prediction(text="A", score=-1.0, probability=1.0)

    async def predict(
        texts: list[str], n_best: int, warnings: list[str]
    ) -> list[list[schemas.Prediction]]:
        warnings += ["w"] * (n_best == 3)
        return [[one] * n_best for _ in texts]

    async def unknown(texts: list[str]) -> list[list[str]] | None:
        return None if "known" in texts else [["x"] for _ in texts]

    model: Any = SimpleNamespace(
        engine=SimpleNamespace(num_beams=3), predict=predict, unknown=unknown
    )
    made = server("de-en")
    answer = run(made.predict(model, schemas.PredictRequest(q=["a", "b"], n_best=2)))
    assert answer == schemas.PredictAnswer(predictions=[[one] * 2] * 2, unknown=[["x"]] * 2)
    answer = run(made.predict(model, schemas.PredictRequest(q="a", n_best=3)))
    assert answer == schemas.PredictAnswer(predictions=[one] * 3, unknown=["x"], warnings=["w"])
    answer = run(made.predict(model, schemas.PredictRequest(q="known")))
    assert answer.model_dump(exclude_unset=True) == {"predictions": [one.model_dump()]}
    message = "400: n_best: at most 3, the beams of the server (serve --num_beams)"
    assert refusal(made.predict, model, schemas.PredictRequest(q="a", n_best=4)) == message


def file_request(source: str, name: str, content: bytes) -> schemas.FileRequest:
    return schemas.FileRequest(file=UploadedFile(name, content), source=source, target="de")


async def of_this_process(upload: Upload, translate: Callable) -> bytes:
    """Read a document as `DocumentProcesses` does. The translation must not wait."""

    def translated(texts: Sequence[str]) -> list[list[TranslatedPart]]:
        try:
            translate(texts).send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("it waits")

    return translate_document(
        upload.content, upload.suffix, translated, upload.source, upload.target
    )


RUSSIAN = "Привет, друг"


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.txt", b"Guten Morgen\n", "Guten Morgen"),
        (
            "a.html",
            b"<head><script>let the = 'words of the page'</script><style>the {}</style></head><p>Ja, <b>gut</b></p>",
            "Ja, gut",
        ),
        ("a.html", f'<meta charset="windows-1251"><p>{RUSSIAN}</p>'.encode("cp1251"), RUSSIAN),
        ("a.txt", RUSSIAN.encode("utf-16"), RUSSIAN),
        (
            "a.po",
            b'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\n'
            b'# the note of the translator\nmsgid "Guten Morgen"\nmsgstr ""\n',
            "Guten Morgen",
        ),
        (
            "a.vtt",
            b"WEBVTT\n\nNOTE the note of the studio\n\n00:01.000 --> 00:02.000\nJa, gut.\n",
            "Ja, gut.",
        ),
        ("a.md", b"---\ntitle: of the page\n---\n\n```\nthe code\n```\n\nJa, gut.\n", "Ja, gut."),
    ],
    ids=["text", "html", "html-1251", "utf-16", "po", "vtt", "md"],
)
def test_language_of_a_document_is_that_of_its_passages(
    name: str, content: bytes, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    detect = detected_by({"fr": 1.0})
    monkeypatch.setattr(interface, "detect_languages", detect)
    made = server("ar-de", "fr-de")
    made.documents = SimpleNamespace(translate=of_this_process)  # type: ignore[assignment]

    async def translated_file(pair: Any, content: bytes, *others: Any) -> bytes:
        return content

    monkeypatch.setattr(made, "_translated_file", translated_file)
    run(made.translate_file(file_request("auto", name, content)))
    assert [seen.strip("\ufeff\n") for seen, _ in detect.seen] == [text]


def test_languages_of_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    detect = detected_by({"fr": 1.0})
    monkeypatch.setattr(interface, "detect_languages", detect)
    made = server("ar-de", "fr-de", "de-en", max_characters=30)
    used = []

    async def translated_file(pair: Any, content: bytes, suffix: str, warnings: list[str]) -> bytes:
        used.append((pair.name, suffix))
        return content.upper()

    monkeypatch.setattr(made, "_translated_file", translated_file)
    made.documents = SimpleNamespace(translate=of_this_process)  # type: ignore[assignment]
    html = b"<p class='x'>bonjour</p><script>of the page</script>"
    key, warnings = run(made.translate_file(file_request("auto", "../a b.HTML", html)))
    assert (made.files[key], warnings) == (html.upper(), [])
    assert key.endswith(".a b.HTML")
    assert [text for text, _ in detect.seen] == ["bonjour"]
    run(made.translate_file(file_request("ar", "a.docx", b"PK")))
    assert used == [("fr-de", ".HTML"), ("ar-de", ".docx")]
    message = "400: source: auto is not supported for .tmx; give a language code"
    assert refusal(made.translate_file, file_request("auto", "a.tmx", b"<tmx>")) == message
    key, _ = run(made.translate_file(file_request("de", "a.txt", b"as it is")))
    assert made.files[key] == b"as it is"
    for name in ("a.exe", "a", "html"):
        assert refusal(made.translate_file, file_request("en", name, b"")).startswith(
            "400: Invalid request: file format not supported (."
        )
    no_source = "400: German (de) is not available as a target language"
    into_english = server("de-en")
    damaged = file_request("auto", "a.docx", b"PK")
    assert refusal(into_english.translate_file, damaged) == no_source
    single = server("en-de", "fr-it", "it-aa")
    monkeypatch.setattr(single, "_translated_file", translated_file)
    run(single.translate_file(file_request("auto", "a.tmx", b"<tmx>")))
    assert used[-1] == ("en-de", ".tmx"), "the only source needs no text"


def test_document_is_translated_within_the_limits_of_a_request() -> None:
    async def translate_aligned(texts: Sequence[str], warnings: list[str], linked: range) -> str:
        return f"{texts} {warnings} {linked}"

    async def of_process(upload: Any, translate: Callable) -> bytes:
        if not upload.content:
            raise ServerEnds
        assert await translate(["a", "b"]) == "['a', 'b'] ['w'] range(0, 2)"
        assert upload == Upload(b"x", ".txt", "en", "de", max_characters=7, seconds=9.0)
        return b"translated"

    made = server(
        pair("en-de", translate_aligned=translate_aligned),
        max_characters=7,
        timeout=9.0,
    )
    made.documents = SimpleNamespace(translate=of_process)  # type: ignore[assignment]
    arguments = (b"x", ".txt", ["w"])
    assert run(made._translated_file(made.pairs[0], *arguments)) == b"translated"
    ends = refusal(made._translated_file, made.pairs[0], b"", ".txt", [])
    assert ends == "503: the server is ending: send the file again"


class Now(Executor):
    """Calls functions at once, and keeps how many results each returns."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def submit(self, function: Callable, *arguments: Any) -> Future:  # type: ignore[override]
        future: Future = Future()
        future.set_result(function(*arguments))
        self.sizes.append(len(future.result()))
        return future


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(0, []), (1, [1]), (32, [32]), (33, [32, 1]), (64, [32, 32]), (100, [32, 32, 32, 4])],
)
def test_other_requests_have_their_turn_after_32_items(count: int, sizes: list[int]) -> None:
    own = Now()
    other = Now()
    self: Any = SimpleNamespace(_text_thread=own)
    expected = [number * 2 for number in range(count)]
    assert run(LanguagePair._map(self, lambda number: number * 2, range(count))) == expected
    assert run(LanguagePair._map(self, lambda number: number * 2, range(count), other)) == expected  # type: ignore[arg-type]
    assert own.sizes == other.sizes == sizes

    aligned: list[int] = []

    async def align(function: Any, sources: list, targets: list) -> list:
        aligned.append(len(sources))
        return [*zip(sources, targets, strict=True)]

    self.inspector = SimpleNamespace(run=align, align=None)
    assert run(LanguagePair._align(self, range(count), expected)) == [
        *zip(range(count), expected, strict=True)
    ]  # type: ignore[arg-type]
    assert aligned == sizes


def test_sentences_have_up_to_1024_tokens() -> None:
    def encode(sentence: str, number: int, warnings: Any) -> list[int]:
        if not sentence:
            raise UserError(f"line {number}: the line is odd")
        return [5] * len(sentence)

    self: Any = SimpleNamespace(translator=SimpleNamespace(encode=encode), item="sentence")
    assert len(LanguagePair._encode(self, "x" * 1024, 1, None)) == 1024  # type: ignore[arg-type]
    with pytest.raises(
        TooLong,
        match="^q: a sentence of 1025 tokens, but the limit is 1024: split it$",
    ):
        LanguagePair._encode(self, "x" * 1025, 1, None)  # type: ignore[arg-type]
    assert error_of(LanguagePair._encode, self, "", 7, None) == "q: the sentence is odd"


END = 2


@pytest.mark.parametrize(
    ("tokens", "limited", "expected"),
    [
        ([[5, END], [END]], False, None),
        ([[5], [5]], True, None),
        ([[5], [END]], False, "FIRST"),
        ([[5, END], [END, 5]], False, "second"),
        ([[5], [], [5]], False, "FIRST and 2 more sentences"),
    ],
)
def test_translations_without_an_end_are_a_warning(
    tokens: list, limited: bool, expected: str | None
) -> None:
    texts = ["long words " * 6, "second", "third"][: len(tokens)]
    first = "long words long words long words long words long words [...]"
    assert len(first) == 60

    def submit(sources: list, n_best: int, prefix: list) -> list[Future]:
        assert (n_best, prefix) == (3, [9])
        futures = [Future() for _ in sources]
        for future, row in zip(futures, tokens, strict=True):
            future.set_result([FoundHypothesis(row, -1.0), FoundHypothesis([5], -2.0)])
        return futures

    translator = SimpleNamespace(end_tokens=frozenset([END]), task="sequence")
    engine = SimpleNamespace(max_queue=3, submit=submit)
    self: Any = SimpleNamespace(
        engine=engine,
        translator=translator,
        mark=[9],
        item="sentence",
        _limited=limited,
    )
    warnings: list[str] = []
    found = run(LanguagePair._hypotheses(self, texts, [[5]] * len(texts), 3, warnings))
    assert [row[0].tokens for row in found] == tokens
    start = "the output did not end before the length limit; max_new_tokens raises it: "
    assert warnings == ([start + expected.replace("FIRST", first)] if expected else [])
    with pytest.raises(TooLong, match="^q: 4 sentences, but the limit is 3$"):
        run(LanguagePair._hypotheses(self, ["x"] * 4, [[5]] * 4, 3, warnings))


def test_sentences_with_fewer_hypotheses_repeat_their_last() -> None:
    self: Any = SimpleNamespace(source="en", target="de")
    parts = [Part("one.", True), Part(" ", False), Part("two.", True)]
    sentences = [[("A.", []), ("B.", []), ("C.", [])], [("D.", [])]]
    ranked = LanguagePair._ranked(self, (parts, sentences))  # type: ignore[arg-type]
    assert ranked == ["A. D.", "B. D.", "C. D."]
    sentences[0] = [("A.", []), ("A.", [])]
    assert LanguagePair._ranked(self, (parts, sentences)) == ["A. D."]  # type: ignore[arg-type]
    assert LanguagePair._ranked(self, ([Part(" \n", False)], [])) == [" \n"]


def test_decoded_texts_have_one_line_and_no_mark() -> None:
    def batch_decode(rows: list[list[int]], **_: Any) -> list[str]:
        return ["\n".join(map(str, row)) for row in rows]

    tokenizer = SimpleNamespace(batch_decode=batch_decode)
    self: Any = SimpleNamespace(mark=[8, 9], translator=SimpleNamespace(target_tokenizer=tokenizer))
    hypotheses = [
        FoundHypothesis([8, 9, 5, 6], -1.0),
        FoundHypothesis([8, 9], None),
    ]
    assert LanguagePair._decode_all(self, hypotheses) == ["5 6", ""]


def test_predictions_have_rounded_scores_and_shares() -> None:
    """The shares are the softmax of the log-probabilities, in which forced tokens do not count."""

    def decode(hypotheses: Sequence[FoundHypothesis]) -> list[str]:
        return [str(one.tokens[0]) for one in hypotheses]

    def log_probability(one: FoundHypothesis, given: int) -> float | None:
        return one.score and one.score * (len(one.tokens) - given)

    engine = SimpleNamespace(log_probability=log_probability)
    self: Any = SimpleNamespace(_decode_all=decode, engine=engine)
    hypotheses = [
        FoundHypothesis([5, 1], -0.1234567),
        FoundHypothesis([6, 1, 1], -1.0),
        FoundHypothesis([5, 1, 1, 1], -1.5),
    ]
    for given in (0, 1):
        arguments = (given,) if given else ()
        masses = [math.exp(one.score * (len(one.tokens) - given)) for one in hypotheses]  # type: ignore[operator]
        share = (masses[0] + masses[2]) / sum(masses)
        found = SequenceModel._predictions(self, hypotheses, *arguments)
        first, second = found
        assert (first.text, first.score) == ("5", -0.1235)
        assert (second.text, second.score) == ("6", -1.0)
        assert first.probability == round(share, 5)
        assert second.probability == round(1 - share, 5)
    greedy = SequenceModel._predictions(self, [FoundHypothesis([5], None)])
    assert [(one.text, one.score, one.probability) for one in greedy] == [("5", None, 1.0)]


def test_lines_of_sequences_keep_their_ends() -> None:
    text = "a\n\n b \r\n \nc"
    expected = [
        ("a", True),
        ("\n", False),
        ("\n", False),
        (" b ", True),
        ("\r\n", False),
        (" ", False),
    ]
    expected += [("\n", False), ("c", True)]
    assert [(part.text, part.is_sentence) for part in _lines(text)] == expected
    assert _lines("") == []


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (HTTPException(418, "teapot", {"X-Y": "z"}), 418, "teapot"),
        (ClientDisconnect(), 499, "the client has disconnected"),
        (QueueFull(), 503, "too many requests wait: try again in a second"),
        (HTTPException(503, "ends"), 503, "ends"),
        (TooLong("q: long"), 413, "q: long"),
        (UserError("q: odd"), 400, "q: odd"),
        (ZeroDivisionError("secret"), 500, "the server has failed: see its log"),
    ],
)
def test_errors_have_a_status_and_a_line(error: Exception, status: int, message: str) -> None:
    answer = run(app._failed(None, error))  # type: ignore[arg-type]
    assert answer.status_code == status
    assert answer.body.decode() == f'{{"error":"{message}"}}'
    assert answer.headers.get("retry-after") == ("1" if status == 503 else None)
    assert answer.headers.get("x-y") == ("z" if status == 418 else None)


def test_work_ends_when_its_client_leaves() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("work")

    def request(*messages: str, timeout: float = 30) -> Any:
        waiting = iter(messages)

        async def receive() -> dict[str, str]:
            for message in waiting:
                return {"type": message}
            await asyncio.sleep(60)
            raise AssertionError

        limits = SimpleNamespace(timeout=timeout)
        return SimpleNamespace(
            receive=receive,
            app=SimpleNamespace(state=SimpleNamespace(limits=limits)),
        )

    async def left() -> None:
        with pytest.raises(ClientDisconnect):
            await app._in_time(request("http.request", "http.zzz", "http.disconnect"), work())

    async def late() -> None:
        with pytest.raises(HTTPException, match="^504: no answer in time: try again later$"):
            await app._in_time(request("http.request", timeout=0.05), work())

    async def done() -> str:
        return "done"

    run(left())
    run(late())
    assert ended == ["work"] * 2
    assert run(app._in_time(request("http.request"), done())) == "done"
