"""Token ids of many sentences, in which a word that came before is looked up.

`tokenizers` takes some 60 µs of processor time for a sentence, most of whose words came before.
"""

import re
from collections.abc import Sequence
from itertools import chain

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .tokenizer_training import untrained_backend

_REMEMBERED = 200_000  # words, some 40 MB


class WordEncoder:
    """Encodes sentences with a tokenizer of `train_tokenizer`, word by word.

    Its pre-tokens are a run of letters, digits or other signs, with the space before it. So no token crosses the
    border of two words that one space separates, and a word has the same tokens in every sentence. Sentences with
    other spaces, or with an added token, are encoded whole.

    Args:
        tokenizer: for which `encodes_by_words` is true.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = [re.escape(str(token)) for token in tokenizer.added_tokens_decoder.values()]
        self._added = re.compile("|".join(added) or "(?!)", re.IGNORECASE)
        self._ids: dict[str, list[int]] = {}
        word = self._encode(["a"], add_special_tokens=False)[0]
        sentence = self._encode(["a"])[0]
        start = next(at for at in range(len(sentence)) if sentence[at : at + len(word)] == word)
        self._before = sentence[:start]
        self._after = sentence[start + len(word) :]

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, those of the tokenizer."""
        rows = [self._words(text) for text in texts]
        self._learn(set(chain.from_iterable(rows)))
        others = [text for text, row in zip(texts, rows, strict=True) if not row]
        encoded_whole = iter(self._encode(others))
        encoded = []
        for row in rows:
            if row:
                words = chain.from_iterable(map(self._ids.__getitem__, row))
                encoded.append([*self._before, *words, *self._after])
            else:
                encoded.append(next(encoded_whole))
        return encoded

    def _words(self, text: str) -> list[str]:
        """The words of a text, or none if it has to be encoded whole."""
        words = text.split()
        if " ".join(words) != text or self._added.search(text):
            return []
        return words

    def _learn(self, words: set[str]) -> None:
        if len(self._ids) + len(words) > _REMEMBERED:
            self._ids.clear()
        new = [word for word in words if word not in self._ids]
        self._ids.update(zip(new, self._encode(new, add_special_tokens=False), strict=True))

    def _encode(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        if not texts:
            return []
        # not verbose: `model_max_length` does not apply
        return self._tokenizer(
            texts,
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]


def encodes_by_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer is a byte-level BPE as `train_tokenizer` makes it, without dropout."""
    if type(tokenizer) is not PreTrainedTokenizerFast:
        return False
    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.model, models.BPE) or backend.model.dropout is not None:
        return False
    if None in map(backend.token_to_id, pre_tokenizers.ByteLevel.alphabet()):
        return False
    own = [untrained_backend(lowercase) for lowercase in (False, True)]
    return _splitting(backend) in map(_splitting, own)


def _splitting(backend: Tokenizer) -> tuple[str, str]:
    """What a tokenizer does to a text before its model sees the pieces."""
    return repr(backend.normalizer), repr(backend.pre_tokenizer)
