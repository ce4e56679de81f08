"""Word vectors that others trained, into the embeddings of a new model: GloVe, word2vec and fastText in text format.

All three are lines of a word and its numbers; word2vec and fastText have a first line with the number of words and of
numbers (Mikolov et al. 2013, Pennington et al. 2014, Bojanowski et al. 2017).

Shapes: V tokens of the vocabulary, F tokens that have a vector, D numbers of a vector and d_model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tokenizers import decoders
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from .readers import open_binary

_SHOWN = 5  # tokens without a vector, in a summary


@dataclass
class VectorReport:
    """What became of a file of word vectors.

    Attributes:
        name: the file.
        width: D.
        words: words in the file.
        dropped: reason -> lines that were no word and D numbers.
        found: token id -> the file's word whose vector it got.
        lowered: how many of them are in the file in lower case only.
        missing: tokens that can be words, but have no vector, in the order of their ids; beginnings of words, which
            look like words, are among them.
        pieces: tokens that cannot: other parts of words, bytes, special tokens. They keep what they had.
        mean: the length of the mean of the F vectors, before it was taken away.
        scale: what the vectors were multiplied with; 1 where they were written as they are.
    """

    name: str
    width: int = 0
    words: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    found: dict[int, str] = field(default_factory=dict)
    lowered: int = 0
    missing: list[str] = field(default_factory=list)
    pieces: int = 0
    mean: float = 0.0
    scale: float = 1.0

    def summary(self) -> str:
        """All of it in one line."""
        whole = len(self.found) + len(self.missing)
        text = (
            f"{self.name}: {self.words:,} words of {self.width} numbers; {len(self.found):,} of the {whole:,} tokens "
            f"that can be words have one ({self.lowered:,} in lower case), {self.pieces:,} are other parts"
        )
        if self.missing:
            text += f"; without: {', '.join(self.missing[:_SHOWN])}{' …' if len(self.missing) > _SHOWN else ''}"
        for reason, count in self.dropped.items():
            text += f"; {count:,} lines dropped: {reason}"
        return text


def load_word_vectors(
    embedding: nn.Embedding, tokenizer: PreTrainedTokenizerBase, path: str | Path, *, rescale: bool = True
) -> VectorReport:
    """Write the vectors of a file into the rows of the tokens that are words of it.

    A token can be a word where it begins one: "▁dog" or "Ġdog" is "dog", while "dog" without the mark of a space is
    the end of another word, such as "hotdog". The word is looked up as it is, then in lower case.

    Args:
        embedding: (V, D), such as `model.get_input_embeddings()` or `model.get_decoder().embed_tokens`; one matrix
            where source and target share it. All other rows stay.
        tokenizer: the one whose ids the embedding has.
        path: text, plain or gzip.
        rescale: take the mean of the F vectors away and multiply what is left with the number that gives it the
            standard deviation of the embedding as it was. A model is built for the size of its own embeddings, to
            which positions are added; vectors as they lie differ by their training (GloVe's 0.4, fastText's 0.05).
            False writes them as they are.

    Returns:
        What was found, and what was not.

    Raises:
        UserError: no vectors of the embedding's width in the file, or none for any token.
    """
    path = Path(path)
    words = _whole_words(tokenizer)
    report = VectorReport(path.name, pieces=len(tokenizer) - len(words))
    wanted = {form for word in words.values() for form in (word, word.lower())}
    vectors = _read(path, wanted, embedding.weight.shape[1], report)
    for index, word in words.items():
        form = word if word in vectors else word.lower()
        if form not in vectors:
            report.missing.append(word)
            continue
        report.found[index] = form
        report.lowered += form != word
    if not report.found:
        raise UserError(
            f"{path}: none of its {report.words:,} words is a token; are the vectors of another language, or the "
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
    report.scale = size / spread if spread > 0 else 1.0  # one word alone has no spread
    return (centred if spread > 0 else rows) * report.scale


def _whole_words(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Token id -> the word that the token is, for tokens that can be words."""
    vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    special = set(tokenizer.all_special_tokens)
    byte_level = any(token.startswith("Ġ") for _, token in vocabulary)
    marked = byte_level or any(token.startswith("▁") for _, token in vocabulary)
    decoder = decoders.ByteLevel()
    words = {}
    for index, token in vocabulary:
        text = decoder.decode([token]) if byte_level else token.replace("▁", " ")
        word = text[1:] if marked and text.startswith(" ") else "" if marked else text
        if token not in special and word and not any(c.isspace() or c == "\ufffd" for c in word):
            words[index] = word
    return words


def _read(path: Path, wanted: set[str], width: int, report: VectorReport) -> dict[str, np.ndarray]:
    """The vectors (D,) of the wanted words; the first counts where a word stands twice."""
    vectors: dict[str, np.ndarray] = {}
    report.width = width
    for raw in _rows(path, width):
        # from the right: GloVe has words with spaces in them
        parts = raw.rsplit(b" ", width)
        reason = "not a word and its numbers" if len(parts) != width + 1 or not parts[0].strip() else None
        if reason is None:
            report.words += 1
            word = parts[0].decode("utf-8", errors="replace")
            if word not in wanted or word in vectors:
                continue
            vector = _numbers(parts[1:])
            if vector is not None:
                vectors[word] = vector
                continue
            report.words -= 1
            reason = "not numbers"
        report.dropped[reason] = report.dropped.get(reason, 0) + 1
    return vectors


def _rows(path: Path, width: int) -> Iterator[bytes]:
    """The lines with vectors, after the first of word2vec and fastText, which says how many there are.

    Raises:
        UserError: the vectors have another width, or there are none.
    """
    with open_binary(path) as lines:
        first = next(lines, b"").rstrip()
        header = len(first.split(b" ")) == 2 and all(part.isdigit() for part in first.split(b" "))
        found = int(first.split(b" ")[1]) if header else first.count(b" ")
        if found != width:
            what = f"vectors of {found} numbers" if found > 0 else "no vectors"
            raise UserError(f"{path} has {what}, and the embedding takes {width}: build the model with that d_model")
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


__all__ = ["VectorReport", "load_word_vectors"]
