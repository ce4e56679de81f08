"""Source text is normalised as by SentencePiece. Targets and tokenizers of other origin stay as they are."""

import io
import unicodedata

import pytest
from datasets import Dataset
from tokenizers import normalizers

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.batches import encode_pairs
from hf_vanilla_transformer.text import train_tokenizer
from hf_vanilla_transformer.text.source_text import normalize, normalizing, source_text
from tests.model_helpers import slow
from tests.serving_helpers import client_of, echo_translator, language_pair

PLAIN = "two hundred and thirty-four cafés"
VARIANTS = [
    *(PLAIN.replace(" ", space) for space in "\u00a0\u2003\u2009\u202f\u3000\t\x85"),
    *(PLAIN.replace("-", hyphen) for hyphen in "\u2010\u2011\u2012\u2013\u2212\uff0d\ufe63"),
    *(PLAIN.replace("hund", f"hun{sign}d") for sign in "\u00ad\u200d\u200e\u2060\x00\x9f\u202a"),
    "\ufeff" + PLAIN,
    PLAIN + "\u200b",
    PLAIN.replace("-", "-\u200b"),
    PLAIN.replace(" ", "\u200b"),
    PLAIN.replace(" ", " \ufeff"),
    unicodedata.normalize("NFD", PLAIN),
    "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in PLAIN),
]


@pytest.fixture(scope="module")
def translator() -> Translator:
    return echo_translator()


@pytest.mark.parametrize("text", VARIANTS)
def test_characters_that_look_the_same_give_the_same_tokens(
    text: str, translator: Translator
) -> None:
    assert normalize(text) == PLAIN
    assert translator.encode(text, 1) == translator.encode(PLAIN, 1)


@pytest.mark.parametrize(
    "text",
    [
        "می\u200cخواهم",
        "क्\u200dष",
        "ᠪᠠᠢᠨ\u180eᠠ",
        "a – b",
        "it´s",
        "日本語。",
        "👨\u200d👩",
        "naïve “x” — y",
    ],
)
def test_characters_with_a_meaning_stay(text: str) -> None:
    assert normalize(text) == text


def test_normalisation_equals_that_of_sentencepiece() -> None:
    spm = pytest.importorskip("sentencepiece", reason="needs the extra `convert`")
    model = io.BytesIO()
    text = iter(["hello world"] * 100)
    spm.SentencePieceTrainer.train(
        sentence_iterator=text,
        model_writer=model,
        vocab_size=30,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    judge = spm.SentencePieceProcessor(model_proto=model.getvalue())
    differences = set()
    for code in (*range(1, 0xD800), *range(0xE000, 0x10000)):
        text = f"a{chr(code)}b"
        if (
            unicodedata.category(chr(code)) != "Cn"
            and normalize(text) != judge.normalize(text).replace("▁", " ").strip()
        ):
            differences.add(chr(code))
    invisible = {
        chr(code)
        for code in (
            0xAD,
            0x344,
            0x34F,
            0x61C,
            0x180E,
            *range(0x200C, 0x2010),
            *range(0x202A, 0x202F),
        )
    }
    invisible |= {chr(code) for code in (*range(0x2060, 0x2065), *range(0x2066, 0x206A))}
    controls = {
        chr(code) for code in (0xB, *range(0x1C, 0x20), *range(0x80, 0xA0))
    }  # spaces, or C1
    hyphens = set("\u2010\u2011\u2012\u2013\u2212\u207b\u208b\ufe58\ufe32")
    rest = differences - invisible - controls - hyphens
    assert [
        character for character in rest if " " not in unicodedata.normalize("NFKC", character)
    ] == []


def test_targets_and_other_tokenizers_are_not_normalised() -> None:
    tokenizer = train_tokenizer([PLAIN] * 3, 300)
    odd = "ｃａｆｅ\u00a0\u2011"
    rows = encode_pairs(
        Dataset.from_dict({"source": [odd], "target": [odd]}), tokenizer, drop_too_long=False
    )[0][0]
    assert (
        rows["labels"]
        == tokenizer(odd)["input_ids"]
        != rows["input_ids"]
        == tokenizer("cafe -")["input_ids"]
    )
    assert tokenizer.decode(rows["labels"], skip_special_tokens=True) == odd
    assert source_text(odd, train_tokenizer([PLAIN] * 3, 300, lowercase=True)) == "cafe -"
    other = train_tokenizer([PLAIN] * 3, 300)
    other.init_kwargs["normalize_source"] = False
    assert source_text(odd, other) == odd


@pytest.mark.parametrize("stride", [17, *slow(1)])
def test_normalizer_of_exports_equals_the_function(stride: int) -> None:
    """After every, or every 17th, character of the first plane."""
    tokenizer = train_tokenizer([PLAIN] * 3, 300)
    exported, target = normalizing(tokenizer, tokenizer)
    normalizer, nfkc = exported.backend_tokenizer.normalizer, normalizers.NFKC()
    codes = [*range(0xD800), *range(0xE000, 2**16)][::stride]
    texts = VARIANTS + [f"a{chr(code)}{after}" for code in codes for after in ("b", "-")]
    for text in texts:
        if nfkc.normalize_str(text) == unicodedata.normalize(
            "NFKC", text
        ):  # the library's Unicode is older
            assert normalizer.normalize_str(text).strip() == normalize(text).strip(), ascii(text)
    assert (
        exported(VARIANTS[0])["input_ids"]
        == tokenizer(PLAIN)["input_ids"]
        != tokenizer(VARIANTS[0])["input_ids"]
    )
    ids = tokenizer(VARIANTS[0])["input_ids"]
    assert target is exported and target.decode(ids) == tokenizer.decode(ids)
    assert normalizing(exported, exported) == (
        exported,
        exported,
    )  # it normalises every text itself
    del tokenizer.init_kwargs["normalize_source"]
    tokenizer.backend_tokenizer.normalizer = None
    assert normalizing(tokenizer, tokenizer) == (tokenizer, tokenizer)


def test_server_normalises_its_sources(translator: Translator) -> None:
    with client_of(language_pair(translator)) as client:
        request = {"source": "en", "target": "de"}
        plain, odd = (
            client.post("/translate", json={"q": q, **request}).json()["translatedText"]
            for q in (PLAIN, VARIANTS[0])
        )
        assert plain == odd
