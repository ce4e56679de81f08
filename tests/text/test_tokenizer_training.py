"""The tokenizer: exact round trips of any text, saving, loading without this package."""

import copy
import json
import os
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

from hf_vanilla_transformer.text import load_tokenizers, save_tokenizers, train_tokenizer
from hf_vanilla_transformer.text.tokenizer_training import (
    sample_numbers,
    train_sentencepiece_tokenizer,
    trained_sentencepiece,
)
from hf_vanilla_transformer.utils.errors import UserError
from tests.damaged_files import DAMAGES
from tests.model_helpers import error_of

CORPUS = [
    "two hundred and thirty-four",
    "zweihundertvierunddreißig",
    "a dog runs , a cat sleeps .",
] * 20

NASTY = [
    "two hundred",
    " leading",
    "  two leading",
    "trailing ",
    "trailing \n",
    "double  spaces   and\ttabs\t\tand\nlines\r\n\n",
    " ",
    "   ",
    "\t",
    "don 't , won't ; it 's ( so ) ! . \"quoted\" &quot; @-@",
    unicodedata.normalize("NFC", "Füße, naïve café, Ångström"),
    unicodedata.normalize("NFD", "Füße, naïve café, Ångström"),
    "ﬁ ² ℌ Ⅷ İ",  # a compatibility normalisation would change each
    "我们在家。日本語　テスト",
    "😀 👩‍👩‍👧 🇩🇪",
    "שלום عليكم हिन्दी",
    "</s>",
    "a</s>b <s> <pad> <unk> </s>",
    "\x00\x01\u2028\u00a0\u200b\ufeff",
    "Ġ Ċ ▁",  # the characters that byte-level BPE and SentencePiece use for a space
    "x" * 3000,
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(CORPUS, vocab_size=320)


def assert_round_trips(tokenizer):
    for text in NASTY:
        ids = tokenizer(text)["input_ids"]
        assert ids[-1] == 2 and ids.count(2) == 1 and not {0, 1, 3} & set(ids), text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    batch = tokenizer(NASTY, padding=True)["input_ids"]
    assert tokenizer.batch_decode(batch, skip_special_tokens=True) == NASTY
    labels = tokenizer(text_target=NASTY)["input_ids"]
    assert tokenizer.batch_decode(labels, skip_special_tokens=True) == NASTY


def test_tokenizer_restores_any_text(tokenizer):
    assert_round_trips(tokenizer)
    assert tokenizer("")["input_ids"] == [2]
    assert tokenizer.decode([2], skip_special_tokens=True) == ""


SCRIPTS = [
    "我们。",
    "ひらがな、",
    "한국어",
    "ภาษา",
    "ខ្មែរ",
    "ລາວ",
    "မြန်မာ",
    "བོད",
    "هذا؟",
    "שלום",
    "हिन्दी",
    "ქართული",
]
SCRIPTS += ["አማርኛ", "ᏣᎳᎩ", "𠀀", "🙂", "½"]


def test_no_character_of_any_script_is_unknown(tokenizer):
    """None of them is in the training text of either tokenizer. NFKC is SentencePiece's default for both sides."""
    for text in SCRIPTS:
        assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]
    pytest.importorskip("sentencepiece", reason="needs the extra `convert`")
    for rule in ("nmt_nfkc", "nfkc", "identity"):
        pieces = train_sentencepiece_tokenizer(CORPUS, 300, normalization=rule)
        for text in [*SCRIPTS, "你好，（世界）！"]:
            ids = pieces(text_target=text)["input_ids"]
            assert pieces.unk_token_id not in ids
            expected = text if rule == "identity" else unicodedata.normalize("NFKC", text)
            assert pieces.decode(ids, skip_special_tokens=True) == expected


def test_special_token_ids_and_padding(tokenizer):
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == ["<s>", "<pad>", "</s>", "<unk>"]
    assert (
        tokenizer.bos_token_id,
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
        tokenizer.unk_token_id,
    ) == ((0, 1, 2, 3))
    batch = tokenizer(["two", "two hundred and"], padding=True)
    assert sorted(batch) == ["attention_mask", "input_ids"]
    assert batch["input_ids"][0][-1] == 1 and batch["attention_mask"][0][-1] == 0
    assert tokenizer.model_max_length > 10**9


def test_word_has_the_same_token_at_the_start_and_within(tokenizer):
    start, middle = (
        tokenizer("hundred")["input_ids"][:-1],
        tokenizer("two hundred")["input_ids"][:-1],
    )
    assert len(start) == 1 and middle[-1] == start[0]


def test_vocabulary_size_and_frequency():
    assert len(train_tokenizer(CORPUS, vocab_size=300)) == 300
    assert len(train_tokenizer(CORPUS, vocab_size=260)) == 260
    # no pair occurs so often: only bytes and special tokens
    assert len(train_tokenizer(CORPUS, vocab_size=300, min_frequency=10_000)) == 260
    with pytest.raises(UserError, match="vocab_size.* 259"):
        train_tokenizer(CORPUS, vocab_size=259)
    assert "min_frequency" in error_of(train_tokenizer, CORPUS, vocab_size=300, min_frequency=0)


def test_training_is_deterministic():
    one, two = (train_tokenizer(iter(CORPUS), vocab_size=300) for _ in range(2))
    assert one.backend_tokenizer.to_str() == two.backend_tokenizer.to_str()


def test_lowercase_changes_nothing_but_the_case():
    tokenizer = train_tokenizer(CORPUS, vocab_size=300, lowercase=True)
    for text in ["  Two Hundred ", "ÄÖÜ ẞ", *NASTY]:
        assert (
            tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text.lower()
        )


def test_tokenizer_is_saved_and_loaded(tokenizer, tmp_path):
    save_tokenizers(tmp_path, tokenizer)
    source, target = load_tokenizers(tmp_path)
    assert source is target
    assert isinstance(source, PreTrainedTokenizerFast)
    assert_round_trips(source)
    assert source("two hundred")["input_ids"] == tokenizer("two hundred")["input_ids"]


def test_separate_tokenizers_are_saved_and_loaded(tokenizer, tmp_path):
    german = train_tokenizer(["zweihundert", "dreihundert"] * 9, vocab_size=270)
    save_tokenizers(tmp_path, tokenizer, german)
    source, target = load_tokenizers(tmp_path)
    assert (len(source), len(target)) == (len(tokenizer), len(german))
    assert (tmp_path / "target_tokenizer" / "tokenizer.json").is_file()
    assert target("zweihundert")["input_ids"] == german("zweihundert")["input_ids"]


def test_joint_tokenizer_replaces_separate_ones(tokenizer, tmp_path):
    save_tokenizers(tmp_path, tokenizer, train_tokenizer(CORPUS, vocab_size=270))
    save_tokenizers(tmp_path, tokenizer, tokenizer)
    source, target = load_tokenizers(tmp_path)
    assert source is target


def test_save_tokenizers_removes_bpe_dropout(tokenizer, tmp_path):
    dropping = copy.deepcopy(tokenizer)
    dropping.backend_tokenizer.model.dropout = 0.3
    save_tokenizers(tmp_path, dropping)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["dropout"] is None
    assert dropping.backend_tokenizer.model.dropout == pytest.approx(0.3)


def test_cached_tokenizer_does_not_read_the_texts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)

    def unread() -> Iterator[str]:
        raise AssertionError("the texts were read")
        yield

    learned = train_tokenizer(CORPUS, 300, content="these").backend_tokenizer.to_str()
    assert train_tokenizer(unread(), 300, content="these").backend_tokenizer.to_str() == learned
    assert train_tokenizer(CORPUS, 300).backend_tokenizer.to_str() == learned
    for others in (
        {"content": "others"},
        {"vocab_size": 310},
        {"min_frequency": 3},
        {"lowercase": True},
        {"content": None},
    ):
        with pytest.raises(AssertionError, match="were read"):
            train_tokenizer(unread(), **{"vocab_size": 300, "content": "these", **others})
    assert [path.name.endswith(".tokenizer.json") for path in tmp_path.rglob("*.*")] == [True]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tokenizer_in_the_cache_is_learned_again(damage, monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    learned = train_tokenizer(CORPUS, 300, content="these").backend_tokenizer.to_str()
    [file] = tmp_path.rglob("*.tokenizer.json")
    content = file.read_bytes()
    DAMAGES[damage](file)
    assert train_tokenizer(CORPUS, 300, content="these").backend_tokenizer.to_str() == learned
    assert file.read_bytes() == content


def test_words_of_a_thousand_characters_are_learned():
    tokenizer = train_tokenizer(["ab" * 500] * 2, vocab_size=262)
    assert {"ab", "abab"} <= set(tokenizer.get_vocab())
    assert "ab" not in train_tokenizer(["ab" * 501] * 2, vocab_size=262).get_vocab()


INTERRUPTED = """
import os, random, signal, threading, time
from hf_vanilla_transformer.text import train_tokenizer
dice = random.Random(0)
texts = [" ".join("".join(dice.choices("abcdefghij", k=900)) for _ in range(30)) for _ in range(300)]
def interrupt():
    time.sleep(1)
    interrupt.time = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
try:
    train_tokenizer(texts, 30_000)
except KeyboardInterrupt:
    print(time.monotonic() - interrupt.time)
"""


@pytest.mark.slow
def test_ctrl_c_ends_tokenizer_training():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and float(done.stdout) < 60, (
        done.stderr
    )  # a second, or more on a busy machine


def test_error_while_reading_texts_is_raised():
    def texts():
        yield "two hundred"
        raise UserError("line 2")

    assert "line 2" in error_of(lambda: train_tokenizer(texts(), 300))


def test_saved_tokenizer_has_a_class_of_transformers_4_and_5(tokenizer, tmp_path):
    save_tokenizers(tmp_path, tokenizer, train_tokenizer(CORPUS, vocab_size=270))
    for folder in (tmp_path, tmp_path / "target_tokenizer"):
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    save_tokenizers(tmp_path / "again", load_tokenizers(tmp_path)[0])
    settings = json.loads(
        (tmp_path / "again" / "tokenizer_config.json").read_text(encoding="utf-8")
    )
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


TRANSFORMERS_4 = """
import json, sys, transformers
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
ids = [tokenizer(text)["input_ids"] for text in json.loads(sys.argv[2])]
print(json.dumps([transformers.__version__, ids]))
"""


def test_transformers_4_gives_the_same_ids(tokenizer, tmp_path):
    python = os.environ.get("TRANSFORMERS_4_PYTHON")
    if not python:
        pytest.skip(
            "TRANSFORMERS_4_PYTHON: name a Python that has transformers 4 (it needs no torch)"
        )
    save_tokenizers(tmp_path, tokenizer)
    texts = [text for text in NASTY if "\x00" not in text]
    done = subprocess.run(
        [python, "-c", TRANSFORMERS_4, str(tmp_path), json.dumps(texts)],
        capture_output=True,
        text=True,
        check=True,
    )
    version, ids = json.loads(done.stdout)
    assert version.startswith("4.") and ids == tokenizer(texts)["input_ids"]


@pytest.mark.parametrize(("size", "limit"), [(10, 3), (3, 2), (1000, 999), (1000, 7)])
def test_sample_has_one_number_of_each_part(size: int, limit: int) -> None:
    drawn = set()
    for seed in range(200):
        numbers = sample_numbers(size, limit, seed).tolist()
        assert len(set(numbers)) == limit and numbers == sorted(numbers)
        for part, number in enumerate(numbers):
            assert part * size // limit <= number < (part + 1) * size // limit
        assert numbers == sample_numbers(size, limit, seed).tolist()
        drawn |= set(numbers)
    assert len(drawn) > 0.5 * size or limit == 7
    assert sample_numbers(limit, size).tolist() == list(range(limit))


def test_too_little_memory_of_sentencepiece_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs the extra `convert`")

    def fail(**settings: object) -> None:
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr(sentencepiece.SentencePieceTrainer, "train", fail)
    assert error_of(trained_sentencepiece, CORPUS, 300).startswith("tokenizer_sentences: ")


def test_warnings_of_sentencepiece_are_shown(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sentencepiece", reason="needs the extra `convert`")
    trained_sentencepiece(CORPUS, 300)
    assert "WARNING" not in capfd.readouterr().err
    trained_sentencepiece([*CORPUS, "a b " * 2000], 300)
    assert "too long" in capfd.readouterr().err
