"""Word vectors: the three text formats, the tokens that get a vector, and the report."""

import gzip

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from torch import nn

from hf_vanilla_transformer.data import train_tokenizer
from hf_vanilla_transformer.data.word_vectors import load_word_vectors
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import error_of, tiny_model, word_tokenizer

D = 8
WORDS = ["the", "dog", "hotdog", "für", "snow", "New"]
rng = np.random.default_rng(3)
VECTORS = {word: rng.normal(0.3, 0.4, D).astype(np.float32) for word in [*WORDS, "unused"]}


def lines(vectors, end=""):
    return [word + " " + " ".join(f"{number:.6f}" for number in vector) + end for word, vector in vectors.items()]


def written(path, format="glove", vectors=VECTORS, extra=()):
    """A file as written by GloVe, word2vec (header, trailing spaces) or fastText (header)."""
    rows = [*lines(vectors, " " if format == "word2vec" else ""), *extra]
    head = [] if format == "glove" else [f"{len(rows)} {D}"]
    path.write_bytes(("\n".join(head + rows) + "\n").encode())
    return path


@pytest.fixture(scope="module")
def tokenizer():
    text = "the dog the hotdog für snow New London the dog snow für hotdog London New"
    return train_tokenizer([text] * 5, 320)


@pytest.fixture
def embedding(tokenizer):
    torch.manual_seed(0)
    return nn.Embedding(len(tokenizer), D)


def token_of(tokenizer, word):
    (index, _) = tokenizer(word)["input_ids"]  # one token and `</s>`
    return index


@pytest.mark.parametrize("format", ["glove", "word2vec", "fasttext"])
def test_vectors_are_read_from_every_format(format, tokenizer, embedding, tmp_path):
    before = embedding.weight.clone()
    report = load_word_vectors(embedding, tokenizer, written(tmp_path / "v.txt", format), rescale=False)
    assert (report.words, report.width, report.dropped) == (len(VECTORS), D, {})
    ids = {word: token_of(tokenizer, word) for word in WORDS}
    assert report.found == {index: word for word, index in ids.items()}
    for word, index in ids.items():
        np.testing.assert_allclose(embedding.weight[index].detach().numpy(), VECTORS[word], atol=1e-6)
    others = [index for index in range(len(tokenizer)) if index not in report.found]
    assert embedding.weight[others].equal(before[others])
    assert "London" in report.missing and not set(report.missing) & set(WORDS)
    assert report.other + len(report.missing) + len(report.found) == len(tokenizer)


def test_rescaling_equals_the_formulas(tokenizer, embedding, tmp_path):
    size = embedding.weight.std().item()
    report = load_word_vectors(embedding, tokenizer, written(tmp_path / "v.txt"))
    rows = np.stack([VECTORS[word] for word in report.found.values()]).astype(np.float64)
    centred = rows - rows.mean(axis=0)
    scale = size / np.sqrt((centred**2).mean())
    assert report.mean == pytest.approx(np.linalg.norm(rows.mean(axis=0)), rel=1e-4)
    assert report.scale == pytest.approx(scale, rel=1e-4)
    found = embedding.weight[list(report.found)].detach().numpy()
    np.testing.assert_allclose(found, centred * scale, atol=1e-5)


def test_gzip_lower_case_and_duplicates(tokenizer, embedding, tmp_path):
    vectors = {"new": VECTORS["New"], "The": VECTORS["dog"], "the": VECTORS["the"]}
    rows = [*lines(vectors), *lines({"the": VECTORS["snow"]})]
    path = tmp_path / "v.vec.gz"
    path.write_bytes(gzip.compress("\n".join([f"4 {D}", *rows]).encode()))
    report = load_word_vectors(embedding, tokenizer, path, rescale=False)
    assert report.lowered == 1 and set(report.found.values()) == {"new", "the"}
    np.testing.assert_allclose(embedding.weight[token_of(tokenizer, "New")].detach(), VECTORS["New"], atol=1e-6)
    np.testing.assert_allclose(embedding.weight[token_of(tokenizer, "the")].detach(), VECTORS["the"], atol=1e-6)


def test_malformed_lines_are_counted_and_words_may_contain_spaces(tokenizer, embedding, tmp_path):
    numbers = " ".join(["0.5"] * D)
    bad = ["dog 1 2 3", f"snow {numbers[:-4]} nan", f"für {numbers[:-4]} x", "", f". . . {numbers}"]
    vectors = {word: VECTORS[word] for word in ("the", "hotdog")}
    report = load_word_vectors(embedding, tokenizer, written(tmp_path / "v.txt", vectors=vectors, extra=bad))
    assert report.dropped == {"not a word and its vector": 2, "not numbers": 2}
    assert report.words == 3 and set(report.found.values()) == {"the", "hotdog"}
    assert report.summary() == (
        f"v.txt: 3 words of 8 dimensions; 2 of {len(report.missing) + 2} tokens that start a word have a vector (0 in "
        f"lower case); {report.other} other tokens; without a vector: {', '.join(report.missing[:5])} …; "
        "2 lines dropped: not a word and its vector; 2 lines dropped: not numbers"
    )


def test_word_level_and_sentencepiece_vocabularies(tmp_path):
    path = written(tmp_path / "v.txt")
    words = word_tokenizer(["<unk>", "the", "dog", "moon"])
    assert load_word_vectors(nn.Embedding(4, D), words, path).found == {1: "the", 2: "dog"}
    marked = word_tokenizer(["<unk>", "▁the", "dog", "▁hot", "▁hotdog", "▁"], pre_tokenizers.Metaspace())
    report = load_word_vectors(nn.Embedding(6, D), marked, path)
    assert report.found == {1: "the", 4: "hotdog"} and report.missing == ["hot"] and report.other == 3


def test_shared_embeddings_stay_shared(tokenizer, tmp_path):
    model = tiny_model(vocab_size=len(tokenizer), d_model=D)
    report = load_word_vectors(model.get_input_embeddings(), tokenizer, written(tmp_path / "v.txt"), rescale=False)
    for matrix in (model.get_encoder().embed_tokens, model.get_decoder().embed_tokens, model.lm_head):
        for index, word in report.found.items():
            np.testing.assert_allclose(matrix.weight[index].detach(), VECTORS[word], atol=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("the 1 2 3\n", "dimension 3"),
        ("10 300\nthe " + "1 " * 300 + "\n", "dimension 300"),
        ("", r"v\.txt"),
        (f"5 {D}\n", " 0 words"),
        (f"1 {D}\nzzz " + "1 " * D + "\n", " 1 words"),
    ],
)
def test_unusable_files_are_one_line_errors(text, message, tokenizer, embedding, tmp_path):
    before = embedding.weight.clone()
    (tmp_path / "v.txt").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        load_word_vectors(embedding, tokenizer, tmp_path / "v.txt")
    assert embedding.weight.equal(before)
    assert "nowhere.txt" in error_of(load_word_vectors, embedding, tokenizer, tmp_path / "nowhere.txt")
