"""Pretrained word vectors for the embeddings of a new model: GloVe, word2vec and fastText in text format.

Each line contains a word and its vector. Files of word2vec and fastText start with a line of the number of words and
the dimension (Mikolov et al. 2013, Pennington et al. 2014, Bojanowski et al. 2017).

Shapes: V tokens of the vocabulary, F tokens with a vector, D dimension of the vectors and d_model.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tokenizers import decoders
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..utils.errors import UserError
from .readers import open_binary
from .side_tokens import Side, side_tokens

_REPORTED_TOKENS = 5


@dataclass
class VectorReport:
    """Counts of the tokens with a vector."""

    name: str  #: the file
    width: int = 0  #: D
    words: int = 0  #: number of words in the file
    dropped: Counter[str] = field(default_factory=Counter)  #: reason -> number of malformed lines
    found: dict[int, str] = field(default_factory=dict)  #: token id -> the word of its vector
    lowered: int = 0  #: how many of them only matched in lower case
    #: candidate tokens (see `load_word_vectors`) without a vector, by id. Many are only prefixes of words.
    missing: list[str] = field(default_factory=list)
    other: int = 0  #: number of other tokens: suffixes of words, bytes, special tokens
    mean: float = 0.0  #: norm of the subtracted mean of the F vectors
    scale: float = 1.0  #: factor of the vectors, or 1 without rescaling

    def summary(self) -> str:
        """The report in one line."""
        candidates = len(self.found) + len(self.missing)
        text = (
            f"{self.name}: {self.words:,} words of {self.width} dimensions; {len(self.found):,} of {candidates:,} "
            f"tokens that start a word have a vector ({self.lowered:,} in lower case); {self.other:,} other tokens"
        )
        if self.missing:
            more = " …" if len(self.missing) > _REPORTED_TOKENS else ""
            text += f"; without a vector: {', '.join(self.missing[:_REPORTED_TOKENS])}{more}"
        for reason, count in self.dropped.items():
            text += f"; {count:,} lines dropped: {reason}"
        return text


def load_word_vectors(
    embedding: nn.Embedding,
    tokenizer: PreTrainedTokenizerBase,
    path: str | Path,
    *,
    rescale: bool = True,
    side: Side = "source",
) -> VectorReport:
    """Copy pretrained word vectors into the embeddings of the tokens that are whole words.

    Only tokens that start a word are candidates: "▁dog" and "Ġdog" are "dog", while "dog" without the marker of a
    space is a suffix, as in "hotdog". A word is looked up as it is, then in lower case.

    Args:
        embedding: (V, D), such as `model.get_input_embeddings()` or `model.get_decoder().embed_tokens`, which may be
            shared. Other rows are not changed.
        tokenizer: of the embedding's ids.
        path: text, plain or gzip.
        rescale: subtract the mean of the F vectors and scale them to the standard deviation of the embedding. The
            model is built for that size relative to the position encoding, and pretrained vectors vary (GloVe 0.4,
            fastText 0.05). False copies them unchanged.
        side: the side of the embedding, if the tokenizer has two vocabularies.

    Raises:
        UserError: the vectors do not have the embedding's dimension, or none belongs to a token.
    """
    path = Path(path)
    tokens = side_tokens(tokenizer, len(embedding.weight), side)
    words = _whole_words(tokens, set(tokenizer.all_special_tokens))
    report = VectorReport(path.name, other=len(tokens) - len(words))
    wanted = {form for word in words.values() for form in (word, word.lower())}
    vectors = _read_vectors(path, wanted, embedding.weight.shape[1], report)
    for index, word in words.items():
        form = word if word in vectors else word.lower()
        if form not in vectors:
            report.missing.append(word)
            continue
        report.found[index] = form
        report.lowered += form != word
    if not report.found:
        raise UserError(
            f"{path}: none of its {report.words:,} words is a token: are the vectors of a different language, or the "
            f"tokens only parts of words?"
        )
    rows = torch.from_numpy(np.stack([vectors[form] for form in report.found.values()]))  # (F, D)
    if rescale:
        rows = _rescaled(rows, float(embedding.weight.detach().std()), report)
    with torch.no_grad():
        ids = torch.tensor(list(report.found), device=embedding.weight.device)
        embedding.weight[ids] = rows.to(embedding.weight)
    return report


def _rescaled(rows: Tensor, size: float, report: VectorReport) -> Tensor:
    mean = rows.mean(dim=0)  # (D,)
    centred = rows - mean
    spread = float(centred.square().mean().sqrt())
    report.mean = float(mean.norm())
    report.scale = size / spread if spread > 0 else 1.0  # a single vector has no spread
    return (centred if spread > 0 else rows) * report.scale


def _whole_words(tokens: list[str], special: set[str]) -> dict[int, str]:
    """Token id -> word, for tokens that start a word."""
    byte_level = any(token.startswith("Ġ") for token in tokens)
    marked = byte_level or any(token.startswith("▁") for token in tokens)
    decoder = decoders.ByteLevel()
    words = {}
    for index, token in enumerate(tokens):
        text = decoder.decode([token]) if byte_level else token.replace("▁", " ")
        word = text[1:] if marked and text.startswith(" ") else "" if marked else text
        if token not in special and word and not any(c.isspace() or c == "\ufffd" for c in word):
            words[index] = word
    return words


def _read_vectors(
    path: Path, wanted: set[str], width: int, report: VectorReport
) -> dict[str, np.ndarray]:
    """The vectors (D,) of the words in `wanted`, the first if a word occurs twice."""
    vectors: dict[str, np.ndarray] = {}
    report.width = width
    for raw in _vector_lines(path, width):
        # from the right, because GloVe contains words with spaces
        parts = raw.rsplit(b" ", width)
        if len(parts) != width + 1 or not parts[0].strip():
            report.dropped["not a word and its vector"] += 1
            continue
        word = parts[0].decode("utf-8", errors="replace")
        if word in wanted and word not in vectors:
            vector = _numbers(parts[1:])
            if vector is None:
                report.dropped["not numbers"] += 1
                continue
            vectors[word] = vector
        report.words += 1
    return vectors


def _vector_lines(path: Path, width: int) -> Iterator[bytes]:
    """The lines after the header, if there is one."""
    with open_binary(path) as lines:
        first = next(lines, b"").rstrip()
        header = len(first.split(b" ")) == 2 and all(part.isdigit() for part in first.split(b" "))
        dimension = int(first.split(b" ")[1]) if header else first.count(b" ")
        if dimension != width:
            content = f"vectors of dimension {dimension}" if dimension > 0 else "no vectors"
            raise UserError(
                f"{path} has {content}, but the embedding has {width}: build the model with that d_model"
            )
        if not header:
            yield first
        for line in lines:
            yield line.rstrip()


def _numbers(parts: list[bytes]) -> np.ndarray | None:
    try:
        vector = np.array([float(part) for part in parts], dtype=np.float32)
    except ValueError:
        return None
    return vector if np.isfinite(vector).all() else None
