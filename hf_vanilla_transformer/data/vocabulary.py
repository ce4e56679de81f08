"""More words for a trained model: a language more, without forgetting how those it knows are written.

Shapes: V tokens before, W tokens after, D d_model.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..errors import UserError


def extend_tokenizer(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], more: int, min_frequency: int = 2
) -> PreTrainedTokenizerFast:
    """Learn more merges from text of a new language, behind those that a byte-pair encoding has.

    Every old token keeps its id, and the old merges still go first. The new ones may join pieces of an old word too,
    where the languages share letters: text of the old languages can come out in fewer tokens, never in others that
    do not decode to it.

    Args:
        tokenizer: one with a byte-pair encoding; left as it is.
        texts: sentences of the new language.
        more: how many tokens to add. Fewer come out where the texts have too few pairs that the old merges lack.
        min_frequency: how often a pair must occur to be merged.

    Returns:
        The extended tokenizer.

    Raises:
        UserError: `more` is below 1, or the tokenizer is no byte-pair encoding.
    """
    if more < 1:
        raise UserError(f"more is {more}; it must be at least 1")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(backend.model, models.BPE):
        raise UserError(f"only a byte-pair encoding can learn more merges; this is a {type(tokenizer).__name__}")
    described = json.loads(backend.to_str())
    vocabulary, merges = described["model"]["vocab"], described["model"]["merges"]
    free = len(tokenizer)
    for left, right in _more_merges(_readings(backend, texts), min_frequency):
        if free == len(tokenizer) + more:
            break
        merges.append([left, right])
        if left + right not in vocabulary:
            vocabulary[left + right] = free
            free += 1
    # all its settings, and the new model in it
    state: dict[str, Any] = {"tokenizer_object": Tokenizer.from_str(json.dumps(described))}
    return type(tokenizer)(**{**tokenizer.init_kwargs, **state})


def _readings(backend: Tokenizer, texts: Iterable[str]) -> Counter[tuple[str, ...]]:
    """Each word of the texts as the tokens that it is read as, and how often it occurs."""
    words: Counter[str] = Counter()
    for text in texts:
        text = backend.normalizer.normalize_str(text) if backend.normalizer else text
        words.update(word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text))
    readings: Counter[tuple[str, ...]] = Counter()
    for word, count in words.items():
        readings[tuple(token.value for token in backend.model.tokenize(word))] += count
    return readings


def _more_merges(readings: Counter[tuple[str, ...]], min_frequency: int) -> Iterator[tuple[str, str]]:
    """Byte-pair encoding (Sennrich et al. 2016, Algorithm 1) that begins with tokens in the place of letters.

    `tokenizers` can only begin with letters; merges learnt so would cross the old ones, and many never apply.
    """
    words, counts = [list(reading) for reading in readings], list(readings.values())
    pairs: Counter[tuple[str, str]] = Counter()
    places: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for index, word in enumerate(words):
        for pair in pairwise(word):
            pairs[pair] += counts[index]
            places[pair].add(index)
    queue = [(-count, pair) for pair, count in pairs.items()]
    heapify(queue)
    while queue:
        count, pair = heappop(queue)
        if -count != pairs[pair]:  # it has changed since it was put there
            if pairs[pair] > 0:
                heappush(queue, (-pairs[pair], pair))
            continue
        if pairs[pair] < min_frequency:
            return
        yield pair
        touched = set()
        for index in sorted(places.pop(pair)):
            for each in pairwise(words[index]):
                pairs[each] -= counts[index]
            words[index] = _merged(words[index], pair)
            for each in pairwise(words[index]):
                pairs[each] += counts[index]
                places[each].add(index)
                touched.add(each)
        for each in sorted(touched):
            heappush(queue, (-pairs[each], each))


def _merged(word: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for token in word:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return merged


@torch.no_grad()
def extend_embeddings(
    model: PreTrainedModel, old: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase, side: str = "source"
) -> None:
    """Give a model rows for the tokens of an extended tokenizer; the old words keep their rows and their logits.

    A new token starts as the mean of the tokens that it was read as before, in each matrix and in the output bias, so
    that nothing that the model knew is lost where the new token takes their place.

    Args:
        model: a translator; changed in place. Where its two languages share their embeddings, all matrices grow.
        old: the tokenizer that the model was trained with.
        new: what `extend_tokenizer` made of it.
        side: "source" or "target": whose vocabulary it is, where they are separate.

    Raises:
        UserError: another side; a tokenizer whose old tokens have other ids, or with more or fewer of them than rows.
    """
    if side not in ("source", "target"):
        raise UserError(f"side={side!r} is none of source, target")
    shared = model.config.share_encoder_decoder_embeddings
    target = side == "target" and not shared
    rows = model.config.target_vocab_size if target else model.config.vocab_size
    moved = [token for token, index in old.get_vocab().items() if new.get_vocab().get(token) != index]
    if moved or len(old) != rows:
        what = f"token {moved[0]!r} has moved" if moved else f"the old one has {len(old)} tokens, the model {rows}"
        raise UserError(f"the tokenizers do not fit: {what}")
    if target:
        model.resize_decoder_token_embeddings(len(new), mean_resizing=False)
    else:
        model.resize_token_embeddings(len(new), mean_resizing=False)
    pieces = _pieces(old, new)
    grown = {id(matrix): matrix for matrix in _grown(model, side)}  # a shared matrix once
    for matrix in grown.values():
        for index, parts in pieces.items():
            matrix[index] = matrix[parts].mean(dim=0)


def _grown(model: PreTrainedModel, side: str) -> list[Tensor]:
    """The matrices (W, D) and the bias (W,) that have a row for each token of a side."""
    shared = model.config.share_encoder_decoder_embeddings
    matrices = [model.get_input_embeddings().weight] if shared or side == "source" else []
    if shared or side == "target":
        matrices += [model.get_decoder().embed_tokens.weight, model.get_output_embeddings().weight]
        bias = model.get_output_embeddings().bias
        matrices += [bias] if bias is not None else []
    return matrices


def _pieces(old: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase) -> dict[int, list[int]]:
    """Id of a new token -> the ids of the old tokens that it joins, by the merges that made it."""
    vocabulary, made = new.get_vocab(), dict[str, tuple[str, str]]()
    merges = json.loads(new.backend_tokenizer.to_str())["model"]["merges"]
    for left, right in merges:
        made.setdefault(left + right, (left, right))

    def parts(token: str) -> list[int]:
        if vocabulary[token] < len(old):
            return [vocabulary[token]]
        return [index for half in made[token] for index in parts(half)]

    return {index: parts(token) for token, index in vocabulary.items() if index >= len(old)}
